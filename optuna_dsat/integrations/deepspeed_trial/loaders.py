"""Data loaders, sharded by rank in an order determined by a seed, and resumable iteration over their batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, Sampler

from optuna_dsat.integrations.deepspeed_trial.checkpoints import random_states, restore_random_states
from optuna_dsat.runtime.adapt.batch_sources import length_of
from optuna_dsat.runtime.failure import TooFewSamplesError
from optuna_dsat.runtime.measure.inputs import leading_dimension


@dataclass(frozen=True)
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
    """Assigns samples of a loader's whole data to the batches of a rank."""

    def __init__(self, loader: DataLoader, shard: Shard) -> None:
        self._loader = loader
        self._shard = shard

    def __len__(self) -> int:
        """Return the number of training batches per epoch and rank; equal on all ranks."""
        if self._loader.yields_batches:
            return len(self._loader.order) // self._shard.size  # type: ignore[arg-type]
        samples, size = self._samples() // self._shard.size, self._loader.batch_size
        drops_last = self._loader.drop_last or self._shard.whole_batches
        return samples // size if drops_last else -(-samples // size)

    def check_training(self) -> None:
        """Raise ``TooFewSamplesError`` if there are too few samples for one batch per rank."""
        if len(self) == 0:
            raise TooFewSamplesError(
                f"The training data has {self._samples_in_words()}: too few for a batch of {self._loader.batch_size} "
                f"on each of {self._shard.size} data-parallel ranks."
            )

    def training(self, epoch: int) -> list[list[int]]:
        """Return the batches (lists of indices) of a training epoch.

        The remainder that cannot be divided equally among the ranks is dropped. Raises as ``check_training``.
        """
        self.check_training()
        order = self._order(epoch)
        if self._loader.yields_batches:
            return [list(batch) for batch in order[self._shard.rank :: self._shard.size]][: len(self)]
        indices = order[self._shard.rank :: self._shard.size][: len(order) // self._shard.size]
        size = self._loader.batch_size
        return [indices[start : start + size] for start in range(0, len(indices), size)][: len(self)]

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
        items, least = order[rank::ranks], len(order) // ranks
        if self._loader.yields_batches:
            batches = [list(batch) for batch in items[:least]]
        elif self._shard.whole_batches:
            batches = [items[start : start + size] for start in range(0, least - size + 1, size)]
        else:
            count = -(-len(order) // (ranks * size))  # number of batches on the rank with the most samples
            if count > least:
                count, items = least, items[:least]
            # Lengths that differ by at most 1
            ends = [len(items) * number // count for number in range(count + 1)] if count else []
            batches = [items[start:end] for start, end in zip(ends, ends[1:])]
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

    def _order(self, epoch: int) -> list[Any]:
        seed = self._shard.seed * 1_000_003 + epoch
        if self._loader.order is None:
            count = len(self._loader.dataset)
            if not self._loader.shuffle:
                return list(range(count))
            return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        _set_epoch(self._loader.order, epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return list(itertools.islice(self._loader.order, len(self._loader.order)))


class _Endless(Sampler[list[int]]):
    """Yields the batches of consecutive epochs."""

    def __init__(self, plan: BatchPlan, epoch: int, offset: int) -> None:
        self._plan, self._epoch, self._offset = plan, epoch, offset
        self.samples_per_rank = plan.samples_per_rank  # read by the runtime

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._plan.training(self._epoch)[self._offset :]
        for epoch in itertools.count(self._epoch + 1):
            yield from self._plan.training(epoch)


def _set_epoch(sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a sampler, and of the sampler within a batch sampler, if it exists."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if candidate is not None and hasattr(candidate, "set_epoch"):
            candidate.set_epoch(epoch)


@dataclass
class Position:
    """Position in this rank's training data."""

    epoch: int = 0
    """Completed epochs."""
    offset: int = 0
    """Completed batches of the current epoch."""
    states: dict[str, Any] | None = None
    """States of the random generators at the epoch's start; None if the order does not depend on them."""


class EndlessBatches(Iterator[Any]):
    """Infinite iterator over training batches; its ``position`` is restored to resume.

    Args:
        start: Yields batches from a position on, and updates it before each batch.
        per_epoch: Batches per epoch; None if the loader has no length.
    """

    def __init__(self, start: Callable[[Position], Iterator[Any]], *, per_epoch: int | None) -> None:
        self._start = start
        self.per_epoch = per_epoch
        self.restore(Position())

    def restore(self, position: Position) -> None:
        """Move to a position."""
        self.position = position
        self._batches = self._start(position)

    def __next__(self) -> Any:
        return next(self._batches)


class PlainBatches(EndlessBatches):
    """Batches of any loader, epoch after epoch; restoring a position reads skipped batches again."""

    def __init__(self, loader: Any) -> None:
        # DeepSpeed's RepeatingLoader hides the end of an epoch.
        loader = loader.loader if type(loader).__name__ == "RepeatingLoader" else loader
        super().__init__(functools.partial(_epochs, loader), per_epoch=length_of(loader) or None)

    def restore(self, position: Position) -> None:
        """Move to a position; restore the random states of its epoch's start if included."""
        if position.states is not None:
            restore_random_states(position.states)
        super().restore(Position(epoch=position.epoch))
        for _ in range(position.offset):
            next(self)


def _epochs(loader: Any, position: Position) -> Iterator[Any]:
    while True:
        for name in ("sampler", "batch_sampler", "data_sampler"):
            _set_epoch(getattr(loader, name, None), position.epoch)
        position.states = random_states()
        for batch in loader:
            position.offset += 1
            yield batch
        if not position.offset:
            raise ValueError("The training data loader yields no batch, or can be iterated over once only.")
        position.epoch, position.offset, position.states = position.epoch + 1, 0, None


def _sharded(loader: DataLoader, shard: Shard, per_epoch: int, position: Position) -> Iterator[Any]:
    for batch in loader.training(shard, epoch=position.epoch, offset=position.offset):
        position.offset += 1
        if position.offset == per_epoch:
            position.epoch, position.offset = position.epoch + 1, 0
        yield batch


class ValidationBatches(Iterator[Any]):
    """Iterator over the batches of a single validation that counts their samples."""

    def __init__(self, loader: Any) -> None:
        self._batches = iter(loader)
        self._samples = 0

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._samples += leading_dimension(batch) or 0
        return batch

    def taken(self) -> int:
        """Return the number of samples since the last call; 0 if none were observed."""
        samples, self._samples = self._samples, 0
        return samples


def training_batches(loader: Any, shard: Shard) -> EndlessBatches:
    """Return the training batches of a rank; a position in a ``DataLoader`` is restored without loading samples."""
    if not isinstance(loader, DataLoader):
        return PlainBatches(loader)
    plan = BatchPlan(loader, shard)
    plan.check_training()
    return EndlessBatches(functools.partial(_sharded, loader, shard, len(plan)), per_epoch=len(plan))
