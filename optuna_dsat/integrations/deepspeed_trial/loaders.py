"""Data, sharded by rank in an order that a seed decides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, Sampler

__all__ = ["BatchPlan", "DataLoader", "Shard", "set_epoch"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which part of the data a rank reads."""

    rank: int
    """Data-parallel rank, from 0."""
    size: int
    """Data-parallel ranks."""
    seed: int = 0
    """Seed of the order; the same on all ranks."""
    whole_batches: bool = False
    """Whether batches that are not full are left out: pipelines need all of one shape."""


class DataLoader:
    """A loader that every rank can shard, and that resumes where it stopped.

    Takes what ``torch.utils.data.DataLoader`` takes, for datasets with an index and a length. The order depends on the
    seed and the epoch alone; all ranks draw the same one and take turns in it. A sampler of one's own yields the order
    of the whole dataset on every rank; torch's generator is seeded around it.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``.
        batch_size: Samples of a batch on one rank.
        shuffle: Whether each epoch has an order of its own.
        sampler: Yields indices, instead of ``shuffle``; has a length.
        batch_sampler: Yields lists of indices, instead of all these; ranks take whole batches in turns.
        num_workers: Processes that load.
        collate_fn: Makes samples into a batch.
        pin_memory: As torch's.
        drop_last: Whether an incomplete last batch of an epoch is left out in training.
        options: What else torch's loader takes (``timeout``, ``worker_init_fn``, ``prefetch_factor``, ...).

    Raises:
        ValueError: If arguments exclude each other, or the dataset has no length.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise ValueError(
                "DataLoader shards a dataset by its indices, and this one has none: return a "
                "torch.utils.data.DataLoader after context.disable_dataset_reproducibility_checks()."
            )
        if (sampler is not None) + (batch_sampler is not None) + bool(shuffle) > 1:
            raise ValueError("shuffle, sampler and batch_sampler exclude each other.")
        if batch_size < 1:
            raise ValueError(f"batch_size is the samples of a batch, at least 1; got {batch_size}.")
        order = sampler if batch_sampler is None else batch_sampler
        if order is not None and not isinstance(order, Sized):
            raise ValueError("A sampler has a length here: the ranks have to agree on the end of an epoch.")
        self.dataset: Sized = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.order = order
        self.yields_batches = batch_sampler is not None
        self.drop_last = drop_last
        self._options = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            **options,
        }

    def training(self, shard: Shard, *, epoch: int = 0, offset: int = 0) -> TorchLoader[Any]:
        """Return an endless loader of a rank's training batches, from batch ``offset`` of an epoch on."""
        return self._loader(_Endless(BatchPlan(self, shard), epoch, offset), shard)

    def validation(self, shard: Shard) -> TorchLoader[Any]:
        """Return a loader of a rank's validation batches: as many as on every other rank."""
        return self._loader(BatchPlan(self, shard).validation(), shard)

    def _loader(self, batches: Any, shard: Shard) -> TorchLoader[Any]:
        # A generator of its own: starting to load must not move torch's.
        generator = self._options.get("generator") or torch.Generator().manual_seed(shard.seed)
        return TorchLoader(self.dataset, batch_sampler=batches, **{**self._options, "generator": generator})  # type: ignore[arg-type]


class BatchPlan:
    """Which samples a rank's batches hold.

    Args:
        loader: The whole data.
        shard: The rank's part of it.
    """

    def __init__(self, loader: DataLoader, shard: Shard) -> None:
        self._loader = loader
        self._shard = shard

    def __len__(self) -> int:
        """Return the training batches of one epoch, the same on all ranks."""
        if self._loader.yields_batches:
            return len(self._loader.order) // self._shard.size  # type: ignore[arg-type]
        own, size = self._samples() // self._shard.size, self._loader.batch_size
        return own // size if self._drops_last() else -(-own // size)

    def training(self, epoch: int) -> list[list[int]]:
        """Return the batches of a training epoch. What the ranks cannot share out evenly is left out.

        Raises:
            ValueError: If not every rank gets a batch.
        """
        if len(self) == 0:
            raise ValueError(
                f"The training data has {self._samples()} samples: too few for a batch of {self._loader.batch_size} on "
                f"each of {self._shard.size} data-parallel ranks."
            )
        order = self._order(epoch)
        if self._loader.yields_batches:
            return [list(batch) for batch in order[self._shard.rank :: self._shard.size]][: len(self)]
        own = order[self._shard.rank :: self._shard.size][: len(order) // self._shard.size]
        size = self._loader.batch_size
        return [own[start : start + size] for start in range(0, len(own), size)][: len(self)]

    def validation(self) -> list[list[int]]:
        """Return the batches of a validation, as many on each rank: at ZeRO 3 the ranks meet in every one.

        Samples are neither repeated nor, where batches may differ in size, left out. Where they may not (``batch_size``
        1, whole batches, a ``batch_sampler``), those that the ranks cannot share out evenly are.

        Raises:
            ValueError: If not every rank gets a batch.
        """
        rank, ranks, size = self._shard.rank, self._shard.size, self._loader.batch_size
        order = self._order(0)
        own, least = order[rank::ranks], len(order) // ranks
        if self._loader.yields_batches:
            batches = [list(batch) for batch in own[:least]]
        elif self._shard.whole_batches:
            batches = [own[start : start + size] for start in range(0, least - size + 1, size)]
        else:
            count = -(-len(order) // (ranks * size))  # batches of the rank with the most samples
            if count > least:
                count, own = least, own[:least]
            batches = _split(own, count)
        if not batches:
            raise ValueError(
                f"The validation data has {self._samples()} samples: too few for a batch on each of {ranks} "
                f"data-parallel ranks{f', of {size} samples for a pipeline' if self._shard.whole_batches else ''}."
            )
        return batches

    def _samples(self) -> int:
        order = self._loader.order
        return len(self._loader.dataset if order is None or self._loader.yields_batches else order)

    def _drops_last(self) -> bool:
        return self._loader.drop_last or self._shard.whole_batches

    def _order(self, epoch: int) -> list[Any]:
        seed = self._shard.seed * 1_000_003 + epoch
        if self._loader.order is None:
            count = len(self._loader.dataset)
            if not self._loader.shuffle:
                return list(range(count))
            return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        set_epoch(self._loader.order, epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return list(itertools.islice(self._loader.order, len(self._loader.order)))


class _Endless(Sampler[list[int]]):
    """Yields the batches of one epoch after another."""

    def __init__(self, plan: BatchPlan, epoch: int, offset: int) -> None:
        self._plan, self._epoch, self._offset = plan, epoch, offset

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._plan.training(self._epoch)[self._offset :]
        for epoch in itertools.count(self._epoch + 1):
            yield from self._plan.training(epoch)


def set_epoch(sampler: Any, epoch: int) -> None:
    """Tell a sampler, or the one within a batch sampler, which epoch begins, if it wants to know."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if candidate is not None and hasattr(candidate, "set_epoch"):
            candidate.set_epoch(epoch)


def _split(indices: list[int], count: int) -> list[list[int]]:
    """Return ``count`` lists of nearly the same length."""
    ends = [len(indices) * number // count for number in range(count + 1)] if count else []
    return [indices[start:end] for start, end in itertools.pairwise(ends)]
