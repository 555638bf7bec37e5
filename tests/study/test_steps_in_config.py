"""Numbers of steps in the config, which a changed global batch scales."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.study.result import learning_rate_advice


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 500}}},
            ("params.warmup_num_steps from 5 to 1", "params.total_num_steps from 500 to 125"),
        ),
        ({"scheduler": {"params": {"cycle_first_step_size": 40}}}, ("cycle_first_step_size from 40 to 10",)),
        ({"scheduler": {"params": {"lr_range_test_step_size": 200}}}, ("lr_range_test_step_size from 200 to 50",)),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}}, ("freeze_step from 400 to 100",)),
    ],
)
def test_numbers_of_steps_are_scaled_with_the_batch(config: dict[str, Any], expected: tuple[str, ...]) -> None:
    advice = learning_rate_advice(config, batch=16, user_batch=4)
    assert advice is not None
    assert all(text in advice for text in expected)


def test_what_the_trainer_computes_is_not_scaled() -> None:
    config = {"scheduler": {"params": {"total_num_steps": "auto"}}, "steps_per_print": 10}
    advice = learning_rate_advice(config, batch=16, user_batch=4)
    assert advice is not None
    assert "counts these in steps" not in advice
