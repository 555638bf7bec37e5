from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.config.autotuning_section import parse_autotuning
from optuna_dsat.tuning.options.autotuning import options_of


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
        ({"tuner_type": "gridsearch"}, "gridsearch"),
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
