"""Data loaders, sharded by rank in an order determined by a seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, Sampler

from optuna_dsat.runtime.failure import TooFewSamplesError

__all__ = ["BatchPlan", "DataLoader", "Shard", "set_epoch"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part of the data that a rank reads."""

    rank: int
    """Data-parallel rank, from 0."""
    size: int
    """Number of data-parallel ranks."""
    seed: int = 0
    """Seed of the order; equal on all ranks."""
    whole_batches: bool = False
    """Whether incomplete batches are dropped; pipelines need batches of equal shape."""


class DataLoader:
    """Data loader that is sharded by rank and resumes at any batch.

    Accepts the arguments of ``torch.utils.data.DataLoader``, for map-style datasets. The order depends only on the
    seed and the epoch; all ranks compute the same order and take its elements round-robin. A custom sampler must yield
    the order of the whole dataset on every rank; torch's random generator is seeded during its iteration.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``.
        batch_size: Samples per batch and rank.
        shuffle: Whether to shuffle in each epoch.
        sampler: Yields indices, instead of ``shuffle``; must have a length.
        batch_sampler: Yields lists of indices, instead of ``batch_size``, ``shuffle`` and ``sampler``; ranks take
            whole batches round-robin. Must have a length.
        num_workers: Number of loading processes.
        collate_fn: Merges samples into a batch; None for torch's default.
        pin_memory: As in torch.
        drop_last: Whether to drop an incomplete last batch of a training epoch.
        options: Other arguments of torch's loader (``timeout``, ``worker_init_fn``, ``prefetch_factor``, ...).

    Raises:
        ValueError: If arguments are mutually exclusive, the batch size is not positive, or dataset or sampler have no
            length.
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
        """Return an infinite loader of a rank's training batches, starting at batch ``offset`` of an epoch."""
        return self._loader(_Endless(BatchPlan(self, shard), epoch, offset), shard)

    def validation(self, shard: Shard) -> TorchLoader[Any]:
        """Return a loader of a rank's validation batches; their number is equal on all ranks."""
        return self._loader(BatchPlan(self, shard).validation(), shard)

    def _loader(self, batches: Any, shard: Shard) -> TorchLoader[Any]:
        # A separate generator, so that creating an iterator does not advance torch's global generator.
        generator = self._options.get("generator") or torch.Generator().manual_seed(shard.seed)
        return TorchLoader(self.dataset, batch_sampler=batches, **{**self._options, "generator": generator})  # type: ignore[arg-type]


class BatchPlan:
    """Assigns samples to the batches of a rank.

    Args:
        loader: Loader of the whole data.
        shard: The rank's part of the data.
    """

    def __init__(self, loader: DataLoader, shard: Shard) -> None:
        self._loader = loader
        self._shard = shard

    def __len__(self) -> int:
        """Return the number of training batches per epoch and rank; equal on all ranks."""
        if self._loader.yields_batches:
            return len(self._loader.order) // self._shard.size  # type: ignore[arg-type]
        own, size = self._samples() // self._shard.size, self._loader.batch_size
        return own // size if self._drops_last() else -(-own // size)

    def training(self, epoch: int) -> list[list[int]]:
        """Return the batches (lists of indices) of a training epoch.

        The remainder that cannot be divided equally among the ranks is dropped.

        Raises:
            TooFewSamplesError: If there are too few samples for one batch per rank.
        """
        if len(self) == 0:
            raise TooFewSamplesError(
                f"The training data has {self._samples_in_words()}: too few for a batch of {self._loader.batch_size} "
                f"on each of {self._shard.size} data-parallel ranks."
            )
        order = self._order(epoch)
        if self._loader.yields_batches:
            return [list(batch) for batch in order[self._shard.rank :: self._shard.size]][: len(self)]
        own = order[self._shard.rank :: self._shard.size][: len(order) // self._shard.size]
        size = self._loader.batch_size
        return [own[start : start + size] for start in range(0, len(own), size)][: len(self)]

    def validation(self) -> list[list[int]]:
        """Return the batches (lists of indices) of a validation; their number is equal on all ranks.

        At ZeRO 3 every batch contains collectives, so all ranks need the same number. Samples are never repeated. If
        batches may differ in size, no sample is dropped; otherwise (``batch_size`` 1, whole batches, a
        ``batch_sampler``) the remainder that cannot be divided equally is dropped.

        Raises:
            ValueError: If there are too few samples for one batch per rank.
        """
        rank, ranks, size = self._shard.rank, self._shard.size, self._loader.batch_size
        order = self._order(0)
        own, least = order[rank::ranks], len(order) // ranks
        if self._loader.yields_batches:
            batches = [list(batch) for batch in own[:least]]
        elif self._shard.whole_batches:
            batches = [own[start : start + size] for start in range(0, least - size + 1, size)]
        else:
            count = -(-len(order) // (ranks * size))  # number of batches on the rank with the most samples
            if count > least:
                count, own = least, own[:least]
            batches = _split(own, count)
        if not batches:
            raise ValueError(
                f"The validation data has {self._samples_in_words()}: too few for a batch on each of {ranks} "
                f"data-parallel ranks{f', of {size} samples for a pipeline' if self._shard.whole_batches else ''}."
            )
        return batches

    @property
    def samples_per_rank(self) -> int | None:
        """Samples per rank and epoch; None with a ``batch_sampler``."""
        return None if self._loader.yields_batches else self._samples() // self._shard.size

    def _samples(self) -> int:
        order = self._loader.order
        return len(self._loader.dataset if order is None or self._loader.yields_batches else order)

    def _samples_in_words(self) -> str:
        count = self._samples()
        return "1 sample" if count == 1 else f"{count} samples"

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
    """Yields the batches of consecutive epochs."""

    def __init__(self, plan: BatchPlan, epoch: int, offset: int) -> None:
        self._plan, self._epoch, self._offset = plan, epoch, offset

    @property
    def samples_per_rank(self) -> int | None:
        """Samples per rank and epoch; None with a batch sampler of the script."""
        return self._plan.samples_per_rank

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._plan.training(self._epoch)[self._offset :]
        for epoch in itertools.count(self._epoch + 1):
            yield from self._plan.training(epoch)


def set_epoch(sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a sampler, and of the sampler within a batch sampler, if it exists."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if candidate is not None and hasattr(candidate, "set_epoch"):
            candidate.set_epoch(epoch)


def _split(indices: list[int], count: int) -> list[list[int]]:
    """Split indices into ``count`` lists whose lengths differ by at most 1."""
    ends = [len(indices) * number // count for number in range(count + 1)] if count else []
    return [indices[start:end] for start, end in itertools.pairwise(ends)]
