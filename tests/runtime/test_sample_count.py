"""Number of samples in a model's inputs, derived from the launch's known batch sizes."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest
import torch

from optuna_dsat.runtime.measure.inputs import BatchNumbers, sample_counter

TOKENS = torch.zeros(12, 6, dtype=torch.long)


def samples(
    batch: Any, *, configured: Set[int], named: Set[int] = frozenset(), loaded: int | None = None
) -> int | None:
    numbers = BatchNumbers(configured=configured, named=named, loaded=loaded)
    size = sample_counter(lambda: numbers)(batch)
    return None if size is None else size.samples


@pytest.mark.parametrize(
    ("batch", "named", "expected"),
    [
        (TOKENS, {6}, 6),
        (torch.zeros(12, 6, 32), {6}, 6),
        (TOKENS, {6, 12}, 12),  # an option has the value of the leading dimension
        (TOKENS, {24}, 12),
        (TOKENS.float(), {6}, 12),  # vectors of six features
        (torch.zeros(12, 6, 8, 8), {6}, 12),  # images of six channels
        (torch.zeros(12, 1, dtype=torch.long), {1}, 12),
    ],
)
def test_time_may_come_first(batch: torch.Tensor, named: set[int], expected: int) -> None:
    assert samples(((batch,), {}), configured={1}, named=named) == expected


def test_a_loaders_batch_size_tells_which_dimension_samples_are() -> None:
    assert samples(TOKENS, configured={6}, loaded=12) == 12
    assert samples(TOKENS, configured={1}, loaded=6) == 6


def test_several_rows_of_each_sample_are_all_counted() -> None:
    assert samples(torch.zeros(16, 3), configured={1, 8}, loaded=8) == 16


def test_what_has_no_tensor_has_no_size() -> None:
    assert samples({"text": "a"}, configured={1}) is None


@pytest.mark.parametrize(("fed", "rows", "expected"), [(8, (2, 1), 4), (7, (2, 1), 4), (6, (3, 2), 4), (8, (1, 1), 8)])
def test_rows_that_are_not_samples_are_counted_as_samples(fed: int, rows: tuple[int, int], expected: int) -> None:
    size = sample_counter(lambda: BatchNumbers(configured={4}, named=set(), loaded=None), rows=rows)(
        torch.zeros(fed, 3)
    )
    assert size is not None
    assert size.samples == expected
