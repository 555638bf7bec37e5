"""Iterators that a model definition receives, and their positions for resuming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optuna_dsat.integrations.deepspeed_trial.loaders import BatchPlan, DataLoader, Shard, set_epoch
from optuna_dsat.integrations.deepspeed_trial.state import random_states, restore_random_states
from optuna_dsat.runtime.measure.inputs import leading_dimension

__all__ = ["EndlessBatches", "PlainBatches", "ShardedBatches", "ValidationBatches", "training_batches"]


@dataclass(kw_only=True)
class Position:
    """Position in this rank's training data."""

    epoch: int = 0
    """Completed epochs."""
    offset: int = 0
    """Completed batches of the current epoch."""
    states: dict[str, Any] | None = None
    """States of the random generators at the epoch's start; None if the order does not depend on them."""


class EndlessBatches(Iterator[Any]):
    """Infinite iterator over training batches.

    Args:
        per_epoch: Batches per epoch; None if the loader has no length.
    """

    def __init__(self, per_epoch: int | None) -> None:
        self.per_epoch = per_epoch
        self.position = Position()

    def restore(self, position: Position) -> None:
        """Move to a position; restore the random states of its epoch's start if included."""
        raise NotImplementedError


class ShardedBatches(EndlessBatches):
    """Batches of this package's ``DataLoader``; restoring a position does not load skipped samples."""

    def __init__(self, loader: DataLoader, shard: Shard) -> None:
        super().__init__(len(BatchPlan(loader, shard)))
        self._loader, self._shard = loader, shard
        self._batches: Iterator[Any] | None = None

    def restore(self, position: Position) -> None:
        """Move to a position."""
        self.position, self._batches = position, None

    def __next__(self) -> Any:
        if self._batches is None:
            place = self.position
            self._batches = iter(self._loader.training(self._shard, epoch=place.epoch, offset=place.offset))
        batch = next(self._batches)
        self.position.offset += 1
        if self.position.offset == self.per_epoch:
            self.position = Position(epoch=self.position.epoch + 1)
        return batch


class PlainBatches(EndlessBatches):
    """Batches of any loader, epoch after epoch; restoring a position reads skipped batches again."""

    def __init__(self, loader: Any) -> None:
        # DeepSpeed's RepeatingLoader hides the end of an epoch.
        self._loader = loader.loader if type(loader).__name__ == "RepeatingLoader" else loader
        super().__init__(_length(self._loader))
        self._batches: Iterator[Any] | None = None

    def restore(self, position: Position) -> None:
        """Move to a position."""
        if position.states is not None:
            restore_random_states(position.states)
        self.position = Position(epoch=position.epoch)
        self._batches = None
        for _ in range(position.offset):
            next(self)

    def __next__(self) -> Any:
        if self._batches is None:
            self._begin()
        try:
            batch = next(self._batches)  # type: ignore[arg-type]  # set by _begin
        except StopIteration:
            self.position = Position(epoch=self.position.epoch + 1)
            self._begin()
            batch = self._first()
        self.position.offset += 1
        return batch

    def _begin(self) -> None:
        for name in ("sampler", "batch_sampler", "data_sampler"):
            set_epoch(getattr(self._loader, name, None), self.position.epoch)
        self.position.states = random_states()
        self._batches = iter(self._loader)

    def _first(self) -> Any:
        try:
            return next(self._batches)  # type: ignore[arg-type]  # set by _begin
        except StopIteration:
            raise ValueError("The training data loader yields no batch, or can be iterated over once only.") from None


class ValidationBatches(Iterator[Any]):
    """Iterator over the batches of a single validation that counts their samples.

    Args:
        loader: Iterated once.
    """

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
    """Return the training batches of a rank."""
    return ShardedBatches(loader, shard) if isinstance(loader, DataLoader) else PlainBatches(loader)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an iterable dataset without length
        return None
