"""What a launch whose script fed less than its micro-batch teaches those after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.study.search import recorder


@pytest.mark.parametrize(("fed", "limit"), [(16, 32), (64, 127), (None, 127)])
def test_a_script_that_feeds_less_than_its_micro_batch_is_asked_for_no_more(fed: int | None, limit: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 2}
    record = SimpleNamespace(observed_micro_batch=fed, data_at_most=lambda batch: 5 * batch)
    flight: Any = SimpleNamespace(request=SimpleNamespace(ds_config=config, end_profile_step=3), record=record)
    assert recorder._data_limit(flight) == limit
