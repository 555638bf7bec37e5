"""Observes data loaders of torch and torchdata.

Records the sizes of each loader and its location in the user's code. In launches that set the batch size through a
loader, replaces the script's batch size, and nothing else: the sampler, order and seed remain unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.measure.inputs import leading_dimension
from optuna_dsat.runtime.user_code import Place, is_size, place_of

__all__ = ["LoaderWatch"]


class LoaderWatch:
    """Records data loaders; sets the launch's micro-batch in loaders of the script's batch size.

    The arguments are those of ``BatchSources``.
    """

    def __init__(
        self, *, micro_batch: int | None, follow: Mapping[str, Any], fed: Callable[[], int], repeat: bool
    ) -> None:
        self._micro_batch = micro_batch
        self._own = int(follow["own"]) if follow.get("kind") == "loader" else None
        self._fed = fed
        self._repeat = repeat
        self._loaders: list[_Loader] = []
        self.loaded: int | None = None
        """Batch size of the loader that yielded last; None if unknown."""

    def callbacks(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return module name -> function to call when the module has been imported."""
        return {
            "torch.utils.data.dataloader": lambda module: self._watch(module.DataLoader),
            "torchdata.stateful_dataloader.stateful_dataloader": lambda module: self._watch(module.StatefulDataLoader),
        }

    def described(self) -> list[dict[str, Any]]:
        """Return the entries of all loaders with known sizes for ``BatchSourcesFound.loaders``."""
        known = [loader for loader in self._loaders if loader.batch_size is not None or loader.samples is not None]
        return [loader.described() for loader in known]

    def _watch(self, loader_class: Any) -> None:

        @patch(loader_class, "__init__")
        def init(original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            noted = _Loader(place_of(sys._getframe(1)))
            args, kwargs = noted.sized(args, kwargs, own=self._own, micro_batch=self._micro_batch)
            original(loader, *args, **kwargs)
            noted.measure(loader)
            loader.__dict__["_optuna_dsat"] = noted
            self._loaders.append(noted)

        @patch(loader_class, "__iter__")
        def iterate(original: Any, loader: Any) -> Any:
            noted = loader.__dict__.get("_optuna_dsat")

            def yielded(batch: Any) -> None:
                self.loaded = None if noted is None or leading_dimension(batch) is None else noted.batch_size

            return _Iteration(
                lambda: original(loader), loader=noted, fed=self._fed, repeat=self._repeat, yielded=yielded
            )


class _Loader:
    """A data loader: its location in the user's code, and its sizes."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.batch_size: int | None = None
        """Samples of a batch in the script; None if the dataset yields batches."""
        self.samples: int | None = None
        """Samples per rank and epoch; None if the dataset has no length, or yields batches."""
        self.loads_all = False
        """Whether each rank loads the whole dataset, because the sampler does not shard it."""
        self.trains = False
        """Whether the engine received inputs during the iteration."""

    def sized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, own: int | None, micro_batch: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a data loader's arguments with batch size ``own`` replaced by the launch's micro-batch."""
        sampler = kwargs.get("batch_sampler", args[4] if len(args) > 4 else None)
        given = kwargs.get("batch_size", args[1] if len(args) > 1 else 1)
        if sampler is not None:
            given = getattr(sampler, "batch_size", None)
        self.batch_size = given if is_size(given) else None
        if own is None or micro_batch is None or self.batch_size != own:
            return args, kwargs
        if sampler is not None:
            sampler.batch_size = micro_batch
        elif "batch_size" in kwargs or len(args) <= 1:
            kwargs = {**kwargs, "batch_size": micro_batch}
        else:
            args = (args[0], micro_batch, *args[2:])
        return args, kwargs

    def measure(self, loader: Any) -> None:
        """Record the samples per rank and epoch, unless the dataset yields the batches."""
        batches: Any = getattr(loader, "batch_sampler", None)
        if hasattr(batches, "samples_per_rank"):  # the batch sampler of a ``DeepSpeedTrial``, which shards
            self.samples = batches.samples_per_rank
        elif batches is not None:
            self.samples = _sampled(batches)
            if self.samples is None:
                self.samples = _length(getattr(loader, "sampler", None))
            sampler = getattr(batches, "sampler", None)
            in_data = _length(getattr(loader, "dataset", None))
            self.loads_all = sampler is not None and not hasattr(sampler, "num_replicas") and self.samples == in_data

    def described(self) -> dict[str, Any]:
        """Return its entry for ``BatchSourcesFound.loaders``."""
        return {
            "batch_size": self.batch_size,
            "file": self.place[0],
            "line": self.place[1],
            "samples": self.samples,
            "loads_all": self.loads_all,
            "trains": self.trains,
        }


class _Iteration:
    """Iterator that restarts when exhausted, if it fed the engine; other iterations end."""

    def __init__(
        self,
        start: Callable[[], Iterator[Any]],
        *,
        loader: _Loader | None,
        fed: Callable[[], int],
        repeat: bool,
        yielded: Callable[[Any], None],
    ) -> None:
        self._start = start
        self._loader = loader
        self._fed = fed
        self._repeat = repeat
        self._yielded = yielded
        self._before = fed()
        self._inner = start()

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        batch = self._next()
        self._yielded(batch)
        return batch

    def _next(self) -> Any:
        feeds = self._fed() > self._before
        if feeds and self._loader is not None:
            self._loader.trains = True
        try:
            return next(self._inner)
        except StopIteration:
            if not (self._repeat and feeds):
                raise
        self._before = self._fed()
        self._inner = self._start()
        return next(self._inner)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _sampled(batches: Any) -> int | None:
    """Return the number of samples that a batch sampler yields to a rank; None if unknown.

    Batch samplers without a ``sampler``, such as accelerate's sharding wrapper, only have a number of batches.
    """
    sampler = getattr(batches, "sampler", None)
    if sampler is not None:
        return _length(sampler)
    count = _length(batches)
    size: Any = getattr(batches, "batch_size", None)
    if count is None or not is_size(size):
        return None
    parts = batches.num_processes if getattr(batches, "split_batches", False) else 1  # a batch is split among all ranks
    return count * int(size) // int(parts)


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError, AttributeError):
        return None
