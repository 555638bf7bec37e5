"""How many samples the inputs of a forward pass are: mostly their leading dimension, not always.

Recurrent models and some transformers take time first: (length, samples, ...). Where a model gets several inputs for
each item of the data (two views, pairs, frames of a video), the loader's batch is a part of what it is fed. Other
numbers tell which it is: the batch sizes of the configs, of options whose names mean one, and of the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from optuna_dsat.runtime.inputs import InputSize, first_tensor, may_have_time_first, size_of

__all__ = ["BatchNumbers", "LoaderBatch", "sample_counter"]


@dataclass(frozen=True, kw_only=True)
class LoaderBatch:
    """What a data loader yielded last."""

    batch_size: int
    """As it was made."""
    samples: int
    """Leading dimension of the batch's first tensor."""


@dataclass(frozen=True, kw_only=True)
class BatchNumbers:
    """Numbers of a launch that mean samples of a batch."""

    configured: Set[int]
    """Micro-batches of the launch's config and of the script's own."""
    named: Set[int]
    """Values of options and settings whose names mean a batch size."""
    loaded: LoaderBatch | None
    """The batch that is in use; None if no data loader is known to have made it."""

    @property
    def of_loader(self) -> Set[int]:
        """The loader's batch size, if there is one."""
        return set() if self.loaded is None else {self.loaded.batch_size}


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
        count = _time_first(batch, size.samples, known) or _per_item(size.samples, known)
        return replace(size, samples=-(-count * rows[1] // rows[0]))

    return counted


def _time_first(batch: Any, leading: int, known: BatchNumbers) -> int | None:
    """Return the second dimension of the inputs if that is the batch size and the leading one is not; else None."""
    tensor = first_tensor(batch)
    if not may_have_time_first(tensor):
        return None
    second = int(tensor.shape[1])
    sizes = known.configured | known.named | known.of_loader
    return second if second > 1 and second in sizes and leading not in sizes else None


def _per_item(leading: int, known: BatchNumbers) -> int:
    """Return the items of the loader's batch if several inputs were made of each, else the leading dimension.

    Of a loader of single items nothing is concluded: its items may be batches.
    """
    sizes, loaded = known.configured | known.named, known.loaded
    if loaded is None or leading in sizes or loaded.batch_size not in sizes - {1}:
        return leading
    whole = 0 < loaded.samples <= loaded.batch_size and leading % loaded.samples == 0
    return loaded.samples if whole else leading
