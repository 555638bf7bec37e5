"""A loop that the hook cannot see reports by itself."""

from __future__ import annotations

import pytest

from optuna_dsat.outcome import Outcome

from .conftest import Launch

pytestmark = pytest.mark.torchrun
EXAMPLE = "core_api"


def test_steps_between_contexts_are_measured_and_counted_once(launch: Launch) -> None:
    overlay = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
    }
    launched = launch("train.py", overlay=overlay, purpose="profile")
    assert launched.report.outcome is Outcome.MEASURED, launched.report
    assert (launched.engine.zero_stage, launched.engine.gradient_accumulation_steps) == (1, 2)
    assert launched.engine.config_differences == {"gradient_clipping": [1.0, None]}
    assert sorted(step.step for step in launched.steps) == [1, 1, 2, 2, 3, 3]
    assert sorted(step.steps_completed for step in launched.steps) == [1, 1, 2, 2, 3, 3]
    assert {(step.samples, step.observed_micro_batch) for step in launched.steps} == {(6, 3)}
    assert all(step.latency_s > 0 for step in launched.steps)
    # Two layers: forward, gradients of the weights, and of the second layer's input; 2 FLOPs per multiply-add.
    assert launched.profile.flops_per_sample == 2 * (2 * (16 * 32 + 32) + 32)
