from __future__ import annotations

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.script.arg_mapping import map_arguments, parse_mappings

CONFIG = {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 2}


def test_deepspeeds_own_mappings_get_their_dashes() -> None:
    pairs = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size", "train_batch_size": "-b"}
    assert parse_mappings(pairs) == {
        "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
        "train_batch_size": "-b",
    }


def test_blanks_around_a_mapping_as_in_deepspeeds_tutorial_do_not_count() -> None:
    pairs = {"gradient_accumulation_steps ": "--gradient_accumulation_steps", "train_batch_size": " b "}
    assert parse_mappings(pairs) == {
        "gradient_accumulation_steps": "--gradient_accumulation_steps",
        "train_batch_size": "--b",
    }


@pytest.mark.parametrize(("pairs", "message"), [({"lr": "--lr"}, "'lr'"), ({"train_batch_size": "--"}, "no option")])
def test_what_cannot_be_mapped_is_refused(pairs: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_mappings(pairs)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--bs", "2", "--x"), ("--bs", "6", "--x")),
        (("--bs=2",), ("--bs=6",)),
        (("--x",), ("--x", "--bs", "6")),
        (("--bsize", "2"), ("--bsize", "2", "--bs", "6")),
    ],
)
def test_an_option_is_overridden_where_present_and_added_elsewhere(
    args: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    mapped = map_arguments(args, {"train_micro_batch_size_per_gpu": "--bs"}, CONFIG, world_size=4)
    assert mapped == expected


def test_a_train_batch_size_left_to_deepspeed_is_worked_out() -> None:
    assert map_arguments((), {"train_batch_size": "--global"}, CONFIG, world_size=4) == ("--global", "48")


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 3}, ("--x", "--stage=3")),
        ({"stage": 0}, ("--x", "--stage=0")),
        (True, ("--x", "--stage=1")),
        ({}, ("--x", "--stage=2")),
        ({"stage": "auto"}, ("--x", "--stage=2")),
    ],
)
def test_an_option_for_the_stage_follows_a_config_that_sets_it(zero: object, expected: tuple[str, ...]) -> None:
    mappings = parse_mappings({"zero_optimization.stage": "stage"})
    config = {**CONFIG, "zero_optimization": zero}
    assert map_arguments(("--x", "--stage=2"), mappings, config, world_size=4) == expected
