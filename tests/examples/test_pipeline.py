"""A pipeline: whole batches, ZeRO 0 and 1 only."""

from __future__ import annotations

import pytest

from optuna_dsat.outcome import Outcome

from .conftest import CONFIG, Launch

pytestmark = pytest.mark.torchrun
EXAMPLE = "pipeline"
ARGS = ("train.py", "--deepspeed_config", CONFIG)


def test_a_pipeline_trains_with_zero_1(launch: Launch) -> None:
    overlay = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 1},
    }
    launched = launch(*ARGS, overlay=overlay)
    assert launched.report.outcome is Outcome.MEASURED, launched.report
    assert launched.engine.pipeline
    assert (launched.engine.data_parallel_size, launched.engine.train_batch_size) == (1, 6)
    assert {(step.samples, step.observed_micro_batch) for step in launched.steps} == {(6, 2)}
    assert {step.samples for step in launched.record.steps} == {6.0}  # both ranks see the same samples
