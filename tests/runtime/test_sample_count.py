"""How many samples a model's inputs are, by the batch sizes that a launch knows of."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest
import torch

from optuna_dsat.runtime.sample_count import BatchNumbers, LoaderBatch, sample_counter

TOKENS = torch.zeros(12, 6, dtype=torch.long)


def samples(
    batch: Any, *, configured: Set[int], named: Set[int] = frozenset(), loaded: LoaderBatch | None = None
) -> int | None:
    numbers = BatchNumbers(configured=configured, named=named, loaded=loaded)
    size = sample_counter(lambda: numbers)(batch)
    return None if size is None else size.samples


def of_loader(batch_size: int, samples: int | None = None) -> LoaderBatch:
    return LoaderBatch(batch_size=batch_size, samples=samples or batch_size)


@pytest.mark.parametrize(
    ("batch", "named", "expected"),
    [
        (TOKENS, {6}, 6),
        (torch.zeros(12, 6, 32), {6}, 6),
        (TOKENS, {6, 12}, 12),  # an option says what the leading dimension is
        (TOKENS, {24}, 12),
        (TOKENS.float(), {6}, 12),  # vectors of six features
        (torch.zeros(12, 6, 8, 8), {6}, 12),  # images of six channels
        (torch.zeros(12, 1, dtype=torch.long), {1}, 12),
    ],
)
def test_time_may_come_first(batch: torch.Tensor, named: set[int], expected: int) -> None:
    assert samples(((batch,), {}), configured={1}, named=named) == expected


def test_a_loaders_batch_size_tells_which_dimension_samples_are() -> None:
    assert samples(TOKENS, configured={6}, loaded=of_loader(12)) == 12
    assert samples(TOKENS, configured={1}, loaded=of_loader(6, 12)) == 6


@pytest.mark.parametrize(
    ("fed", "loaded", "expected"),
    [
        (16, of_loader(8), 8),  # two views of each
        (10, of_loader(8, 5), 5),  # the last batch of an epoch
        (8, of_loader(8), 8),
        (4, of_loader(8), 4),  # a part of the loader's batch
        (12, of_loader(8), 12),
        (16, of_loader(1), 16),  # its items are batches
        (16, of_loader(16), 16),
        (32, of_loader(16), 32),  # a batch size that nothing else names
        (16, None, 16),
    ],
)
def test_an_item_of_the_data_may_be_several_inputs(fed: int, loaded: LoaderBatch | None, expected: int) -> None:
    assert samples(torch.zeros(fed, 3), configured={1, 8}, loaded=loaded) == expected


def test_inputs_of_the_configured_size_are_samples_whatever_the_loader_yields() -> None:
    assert samples(torch.zeros(16, 3), configured={1, 16, 8}, loaded=of_loader(8)) == 16


def test_what_has_no_tensor_has_no_size() -> None:
    assert samples({"text": "a"}, configured={1}) is None


@pytest.mark.parametrize(("fed", "rows", "expected"), [(8, (2, 1), 4), (7, (2, 1), 4), (6, (3, 2), 4), (8, (1, 1), 8)])
def test_rows_that_are_not_samples_are_counted_as_samples(fed: int, rows: tuple[int, int], expected: int) -> None:
    size = sample_counter(lambda: BatchNumbers(configured={4}, named=set(), loaded=None), rows=rows)(
        torch.zeros(fed, 3)
    )
    assert size is not None
    assert size.samples == expected
