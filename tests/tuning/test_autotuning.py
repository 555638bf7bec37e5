"""The autotuning section, and what is said of the options before a search starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from optuna_dsat.config import user_file
from optuna_dsat.config.autotuning_section import parse_autotuning
from optuna_dsat.tuning.options.autotuning import options_of
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import AutotuningOptions, RandomOptions
from optuna_dsat.tuning.prepare import prepare, prepare_each
from tests.harness.entry_points import DS_CONFIG, EntryPointBench, bench


def options(**section: Any) -> tuple[dict[str, Any], list[str]]:
    return options_of(parse_autotuning({"autotuning": section}))


def test_what_deepspeed_asks_for_becomes_our_options() -> None:
    result, notes = options(
        enabled=True, start_step=4, end_step=9, metric="FLOPS", tuner_type="random", tuner_num_trials=7,
        tuner_early_stopping=3, num_gpus=[1, 2], num_nodes=1, mp_size=1, fast=False,
        arg_mappings={"train_micro_batch_size_per_gpu": "--batch"}, max_train_batch_size=64,
    )  # fmt: skip
    assert result == {
        "start_profile_step": 4, "end_profile_step": 9, "metric": "FLOPS_per_gpu", "method": "random",
        "max_trials": 7, "early_stopping": 3, "gpus_per_trial": 2,
    }  # fmt: skip
    assert notes == []


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"results_dir": "r"}, "results_dir"),
        ({"model_info": {"profile": True}}, "model_info"),
        ({"num_tuning_micro_batch_sizes": 3}, "num_tuning_micro_batch_sizes"),
        ({"metric": "speed"}, "metric"),
        ({"tuner_type": "genetic"}, "tuner_type"),
        ({"tuner_type": "gridsearch"}, "tuner_type 'gridsearch' is not available: "),
        ({"num_nodes": 2}, "num_nodes"),
        ({"mp_size": 2}, "mp_size"),
        ({"enabled": False}, "enabled"),
        ({"turbo": 1}, "turbo"),
    ],
)
def test_what_cannot_be_honoured_is_named(section: dict[str, Any], named: str) -> None:
    _, notes = options(**section)
    assert len(notes) == 1
    assert named in notes[0]


__all__ = ["bench"]


def test_misspelt_keys_of_the_config_are_named(bench: EntryPointBench) -> None:
    (bench.folder / "ds.json").write_text(json.dumps({**DS_CONFIG, "zero_optimisation": {"stage": 3}}))
    given = Given(options=RandomOptions(script="train.py", ds_config="ds.json", cpu_ranks=2), origins={})
    assert "DeepSpeed ignores the key 'zero_optimisation' of the config; 'zero_optimization' is probably meant." in (
        prepare("random", given).notes
    )


@pytest.mark.usefixtures("bench")
def test_all_searches_of_a_start_read_the_config_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=user_file.read)
    monkeypatch.setattr(user_file, "read", read)
    given = Given(options=AutotuningOptions(script="train.py", ds_config="ds.json", cpu_ranks=(1, 2)))
    assert [item.request.spec.slots_per_trial for item in prepare_each(None, given)] == [1, 2]
    read.assert_called_once_with(Path("ds.json"))
