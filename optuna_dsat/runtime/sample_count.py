"""How many samples the inputs of a forward pass are: mostly their leading dimension, not always.

Recurrent models and some transformers take time first: (length, samples, ...). Other numbers show which dimension it
is: the batch sizes of the configs, of options whose names mean one, and of the loader. Where a model gets several rows
for each sample (two views, pairs, frames of a video), launches at two sizes have shown how many
(``optuna_dsat.study.batch_search``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from optuna_dsat.runtime.inputs import InputSize, first_tensor, may_have_time_first, size_of

__all__ = ["BatchNumbers", "sample_counter"]


@dataclass(frozen=True, kw_only=True)
class BatchNumbers:
    """Numbers of a launch that mean samples of a batch."""

    configured: Set[int]
    """Micro-batches of the launch's config and of the script's own."""
    named: Set[int]
    """Values of options and settings whose names mean a batch size."""
    loaded: int | None
    """Batch size of the data loader that made the batch in use; None if no data loader is known to have made it."""


def sample_counter(
    numbers: Callable[[], BatchNumbers], *, rows: Sequence[int] = (1, 1)
) -> Callable[[Any], InputSize | None]:
    """Return what tells the size of a forward pass's inputs; None if they have no tensor.

    Args:
        numbers: Returns the numbers that are known at the time.
        rows: Rows that the model is fed, and the samples that they are: (2, 1) for pairs.
    """

    def counted(batch: Any) -> InputSize | None:
        size = size_of(batch)
        if size is None:
            return None
        known = numbers()
        count = _time_first(batch, size.samples, known) or size.samples
        return replace(size, samples=-(-count * rows[1] // rows[0]))

    return counted


def _time_first(batch: Any, leading: int, known: BatchNumbers) -> int | None:
    """Return the second dimension of the inputs if that is the batch size and the leading one is not; else None."""
    tensor = first_tensor(batch)
    if not may_have_time_first(tensor):
        return None
    second = int(tensor.shape[1])
    sizes = known.configured | known.named | {known.loaded}
    return second if second > 1 and second in sizes and leading not in sizes else None
