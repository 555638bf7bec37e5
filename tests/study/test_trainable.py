from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.study.config_changes import ready_config
from optuna_dsat.study.requests import full_request
from optuna_dsat.study.spec import make_spec

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
COMPLETE = {"zero_optimization": {"stage": 3}, TRAIN: 12, MICRO: 3, ACCUMULATION: 2}


@pytest.mark.parametrize(
    ("own", "left_out"),
    [
        ((), {TRAIN}),
        ((MICRO,), {TRAIN}),
        ((MICRO, ACCUMULATION), {TRAIN}),
        ((TRAIN,), {ACCUMULATION}),
        ((TRAIN, MICRO), {ACCUMULATION}),
        ((TRAIN, MICRO, ACCUMULATION), set()),
    ],
)
def test_two_batch_sizes_are_written_unless_the_users_config_has_all_three(
    own: tuple[str, ...], left_out: set[str]
) -> None:
    config = ready_config(COMPLETE, own=dict.fromkeys(own, 1), trainer=None)
    assert config == {key: value for key, value in COMPLETE.items() if key not in left_out}


def test_the_trainers_refusals_are_left_out_too() -> None:
    trainer = ScriptTrainer(framework="lightning", micro_batch=3, gradient_accumulation_steps=2, options={})
    config = ready_config(COMPLETE, own={MICRO: 1}, trainer=trainer)
    assert config.keys() & {TRAIN, MICRO, ACCUMULATION} == {MICRO}


def test_training_by_the_tuner_leaves_the_global_batch_to_deepspeed_as_its_launches_do() -> None:
    script: dict[str, Any] = {"script": "train.py", "args": (), "cwd": "/project", "config_path": ""}
    spec = make_spec(
        name="s", method="random", script=script, ds_config={}, device="cpu", slots_per_trial=2, output_dir="o"
    )
    request = full_request(spec, config=COMPLETE, overlay={})
    assert request.ds_config == {key: value for key, value in COMPLETE.items() if key != TRAIN}
