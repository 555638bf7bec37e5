from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, BatchTriangle
from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.events import BatchSourcesFound
from optuna_dsat.script.arg_mapping import RANK_BATCH, map_arguments, parse_mappings
from optuna_dsat.script.batch_rule import BatchRule, global_batch_option, guesses, held, samples_per_rank


def found(**values: Any) -> BatchSourcesFound:
    return BatchSourcesFound(**{"rank": 0, "time": 0.0, "options": {}, **values})


def loader(batch_size: int = 4, *, trains: bool = True, samples: int | None = 100) -> dict[str, Any]:
    return {"batch_size": batch_size, "file": "/a/train.py", "line": 7, "samples": samples, "trains": trains}


def test_an_option_of_that_value_and_name_comes_first() -> None:
    noted = found(options={"--epochs": 4, "--eval-batch-size": 4, "--batch-size": 4}, loaders=[loader()])
    assert [rule.option or rule.kind for rule in guesses(noted, fed=4, ranks=2)] == [
        "--batch-size", "--eval-batch-size", "loader", "--epochs"
    ]  # fmt: skip


@pytest.mark.parametrize("size", [4, 8])
def test_two_options_may_set_the_batch_size_together(size: int) -> None:
    options = {"--training-batch": 4, "--generation_batch": 4, "--eval-batch": 4, "--epochs": 4}
    rules = guesses(found(options=options), fed=4, ranks=2, present=size, configured=4)
    pair = next(rule for rule in rules if " " in rule.option)
    names = [rule.option for rule in rules if rule.kind == "option"]
    assert names == ["--training-batch", "--generation_batch", "--eval-batch", pair.option, "--epochs"]
    assert "--training-batch and --generation_batch (now 4" in pair.announcement()
    config = {MICRO_BATCH: 16}
    given = map_arguments(("--generation_batch=4",), pair.arg_mappings, config, world_size=2)
    assert given == ("--generation_batch=16", "--training-batch=16")


def test_an_option_may_count_the_samples_of_all_ranks() -> None:
    (rule,) = guesses(found(options={"--global-batch": 8}), fed=4, ranks=2)
    assert rule.arg_mappings == {TRAIN_BATCH: "--global-batch"}
    assert guesses(found(options={"--batch": 8}), fed=4, ranks=1) == []


@pytest.mark.parametrize(("value", "grown"), [(4, 16), (8, 32), (12, 48), (24, 96)])
def test_an_option_may_count_any_samples_of_a_step(value: int, grown: int) -> None:
    """A script may divide it by its accumulation steps (3), its ranks (2) or both."""
    (rule,) = guesses(found(options={"--batch": value}), fed=4, ranks=2, steps=3)
    config = {MICRO_BATCH: 16, GRADIENT_ACCUMULATION: 3}
    assert map_arguments((), rule.arg_mappings, config, world_size=2) == ("--batch", str(grown))
    setting = replace(rule, kind="setting", file="/a/run.yaml", key="batch")
    assert setting.source(ranks=2)["scale"] * 16 == grown
    assert f"to {grown}:" in setting.advice({**config, TRAIN_BATCH: 96})
    assert not rule.holds_steps(accumulation_option="--accum", ranks=2)
    assert setting.holds_steps(accumulation_option="--accum", ranks=2) is (value > 8)


def test_the_steps_are_held_if_the_script_may_divide_by_its_steps_or_its_ranks() -> None:
    (rule,) = guesses(found(options={"--batch": 8}), fed=4, ranks=2, steps=2)
    assert rule.holds_steps(accumulation_option="--accum", ranks=2)
    assert guesses(found(options={"--epochs": 16}), fed=4, ranks=2, steps=2) == []


def test_a_script_with_both_batch_sizes_is_given_both() -> None:
    own, nothing = BatchTriangle(train_batch_size=32, micro_batch=4, gradient_accumulation_steps=4), ("", TRAIN_BATCH)
    alone = BatchTriangle(train_batch_size=4, micro_batch=4, gradient_accumulation_steps=1)
    for options, expected in (
        ({"--epochs": 32, "--global_batch_size": 32}, ("--global_batch_size", TRAIN_BATCH)),
        ({"--batch_size": 16}, ("--batch_size", RANK_BATCH)),
        ({"--eval_batch_size": 32}, nothing),
        ({"--global_batch_size": 64}, nothing),
    ):
        noted = found(options={"--micro_batch_size": 4, **options})
        assert global_batch_option(noted, own, micro_batch=4) == expected
        assert global_batch_option(noted, alone, micro_batch=4) == nothing


def test_a_micro_batch_is_no_global_batch_where_the_config_gives_none() -> None:
    """On 8 ranks, ``--bs 8`` is the global batch of a micro-batch of 1, which a config without batch sizes has."""
    unknown = BatchTriangle(train_batch_size=8, micro_batch=1, gradient_accumulation_steps=1)
    assert global_batch_option(found(options={"--bs": 8}), unknown, micro_batch=8)[0] == ""


def test_an_option_with_the_number_of_rows_is_the_micro_batch_rather_than_a_global_batch_of_pairs() -> None:
    first, *_ = guesses(found(options={"--batch-size": 8}), fed=8, ranks=2, present=4, configured=1)
    assert (first.own, first.counts, first.rows) == (8, MICRO_BATCH, (1, 1))


def test_a_length_is_no_batch_size() -> None:
    for name in ("--bptt", "--seq-len", "--max_length", "model.block_size=", "--context", "--num-steps"):
        assert guesses(found(options={name: 4}), fed=4, ranks=1) == []
        assert guesses(found(settings=[{"file": "/a/run.yaml", "key": name, "value": 4}]), fed=4, ranks=1) == []


def test_a_held_batch_is_not_compared_with_the_config() -> None:
    assert held(4).source(ranks=2) == {"kind": "held"}
    assert BatchRule(kind="option", own=4, option="--b").source(ranks=2) == {}


def test_names_that_mean_a_batch_size() -> None:
    for name in ("--bs", "-b", "--bz", "--mb", "--mbs", "--micro", "train.batch=", "--per_device_bsz"):
        rules = guesses(found(options={name: 4}, loaders=[loader()]), fed=4, ranks=1)
        assert [rule.kind for rule in rules] == ["option", "loader"], name


def test_a_setting_of_a_file_and_a_loader_are_told_to_the_ranks() -> None:
    noted = found(settings=[{"file": "/a/run.yaml", "key": "train.batch", "value": 8}], loaders=[loader()])
    setting, of_loader = guesses(noted, fed=4, ranks=2)
    assert setting.source(ranks=2) == {
        "kind": "setting", "file": "/a/run.yaml", "key": "train.batch", "own": 4, "scale": 2
    }  # fmt: skip
    assert of_loader.source(ranks=2) == {"kind": "loader", "own": 4}
    config = {MICRO_BATCH: 16, TRAIN_BATCH: 32}
    assert setting.advice(config).startswith("Set train.batch in /a/run.yaml to 32")
    assert of_loader.advice(config).startswith("The data loader at /a/train.py:7 needs a batch size of 16")
    assert of_loader.advice({MICRO_BATCH: 4}) == ""


@pytest.mark.parametrize(
    ("reads_launch", "kinds"), [(True, ["config", "loader"]), (False, ["config", "setting", "loader"])]
)
def test_a_config_that_the_script_opens_by_its_own_name_is_a_settings_file(
    reads_launch: bool, kinds: list[str]
) -> None:
    noted = found(settings=[{"file": "/a/ds.json", "key": MICRO_BATCH, "value": 4}], loaders=[loader()])
    rules = guesses(noted, fed=4, ranks=2, present=4, configured=4, reads_launch=reads_launch)
    assert [rule.kind for rule in rules] == kinds


def test_a_rule_is_stored_whole() -> None:
    rule = BatchRule(kind="option", own=4, option="--batch-size")
    assert BatchRule.from_json(rule.to_json()) == rule
    assert "--batch-size (now 4)" in rule.announcement(stated="auto")
    assert "--batch-size (now 4, not 8 as in the config)" in rule.announcement(stated=8)
    assert "the micro-batch stays 4" in held(4).announcement()
    assert "a single row at a batch size of 4" in BatchRule(kind="held", own=4, rows=(1, 4)).announcement()


def test_only_a_loader_that_feeds_the_engine_tells_how_much_data_there_is() -> None:
    noted = found(loaders=[loader(trains=False, samples=10), loader(samples=None), loader(samples=70)])
    assert samples_per_rank(noted) == 70
    assert samples_per_rank(found()) is None
    noted = found(loaders=[loader(2, samples=10), loader(4, samples=70)])
    assert samples_per_rank(noted, fed=4) == 70
    assert samples_per_rank(noted, fed=3) == 10


def test_an_override_of_hydras_is_replaced() -> None:
    mapped = map_arguments(["a=1", "train.batch=4"], {MICRO_BATCH: "train.batch="}, {MICRO_BATCH: 9}, world_size=1)
    assert mapped == ("a=1", "train.batch=9")


FED_AT = [{"file": "/a/train.py", "line": 30}, {"file": "/a/train.py", "line": 40}]


def test_no_line_is_named_as_the_batch_size_without_a_proof() -> None:
    rule = held(8, sources=found(fed_at=FED_AT), ranks=2)
    assert "(8) was not found; the batches go to the model at train.py, line 30" in rule.announcement()
    assert "an environment variable or an INI file is not followed" in rule.announcement()
    assert rule.advice({MICRO_BATCH: 8}) == ""
    assert BatchRule.from_json({**rule.to_json(), "constant": True, "key": "BATCH"}).advice({MICRO_BATCH: 8}) == ""


VIEWS = {"--frames": 8, "--batch_size": 4, "--eval_batch_size": 4}


def test_rows_of_the_users_micro_batch_are_guessed_before_numbers_that_equal_the_rows() -> None:
    rules = guesses(found(options=VIEWS, loaders=[loader()]), fed=8, ranks=2, present=4, configured=1)
    assert [(rule.option or rule.kind, rule.own, rule.rows) for rule in rules] == [
        ("--batch_size", 4, (2, 1)), ("loader", 4, (2, 1)), ("--frames", 8, (1, 1)), ("config", 4, (8, 1))
    ]  # fmt: skip


def test_an_option_of_the_users_micro_batch_is_guessed_whatever_its_name() -> None:
    rules = guesses(found(options={"--size": 4, "--total": 16, "--workers": 8}), fed=8, ranks=2, present=4)
    assert [(rule.option, rule.own, rule.rows) for rule in rules] == [
        ("--size", 4, (2, 1)), ("--workers", 8, (1, 1)), ("--total", 8, (1, 1))
    ]  # fmt: skip


def test_rows_that_are_a_multiple_of_a_number_of_another_size_than_the_configs_are_guessed() -> None:
    rules = guesses(found(options={"--batch_size": 4}), fed=12, ranks=1, present=1, configured=1)
    assert [(rule.kind, rule.own, rule.rows) for rule in rules] == [("option", 4, (3, 1)), ("config", 1, (12, 1))]


def test_a_script_that_reads_the_config_may_feed_several_rows_for_each_sample() -> None:
    rules = guesses(found(options={"--batch_size": 4}), fed=2, ranks=1, present=4, configured=1)
    assert [(rule.kind, rule.own, rule.rows) for rule in rules] == [("config", 4, (2, 1))]
    assert rules[0].source(ranks=1) == {"rows": [2, 1]}
    assert "feeds the engine 2 rows for each sample" in rules[0].announcement()
    assert rules[0].advice({MICRO_BATCH: 8}) == ""


def test_rows_per_sample_are_stored_and_reach_the_launch() -> None:
    rule = BatchRule(kind="loader", own=4, file="/a/train.py", line=7, rows=(3, 2))
    assert BatchRule.from_json(rule.to_json()) == rule
    assert rule.source(ranks=1) == {"kind": "loader", "own": 4, "rows": [3, 2]}
    assert (rule.multiple, rule.scaled(100)) == (2, 150)
    assert "feeds the engine 3 rows for 2 samples" in rule.announcement()


def test_a_held_batch_keeps_the_number_of_the_script_that_is_no_count_of_rows() -> None:
    rule = held(8, sources=found(options={"--batch_size": 4}, fed_at=FED_AT), present=4, ranks=2)
    assert (rule.own, rule.rows, rule.multiple) == (4, (2, 1), 1)
    assert "fed 8 rows at a batch size of 4, in no fixed proportion" in rule.announcement()
    assert held(16, sources=found(options={"--batch_size": 16}), present=4, ranks=1).own == 16
    assert held(16, sources=found(), present=4, ranks=1).own == 4
    assert held(15, sources=found(), present=4, ranks=1).own == 15


CONFIG = {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 2}


def test_deepspeeds_own_mappings_get_their_dashes_and_lose_the_blanks_of_its_tutorial() -> None:
    pairs = {MICRO_BATCH: "per_device_train_batch_size", "gradient_accumulation_steps ": "--steps", TRAIN_BATCH: " -b "}
    assert parse_mappings(pairs) == {
        MICRO_BATCH: "--per_device_train_batch_size", "gradient_accumulation_steps": "--steps", TRAIN_BATCH: "-b",
    }  # fmt: skip
    for wrong, message in (({"lr": "--lr"}, "'lr'"), ({TRAIN_BATCH: "--"}, "no option")):
        with pytest.raises(UsageError, match=message):
            parse_mappings(wrong)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--bs", "2", "--x"), ("--bs", "6", "--x")),
        (("--bs=2",), ("--bs=6",)),
        (("--x",), ("--x", "--bs", "6")),
        (("--bsize", "2"), ("--bsize", "2", "--bs", "6")),
        (("a.py", "--steps=2"), ("a.py", "--steps=2", "--bs=6")),
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
