"""Observes sources of batches: data loaders of torch, ``datasets``, ``webdataset``, datasets that yield batches.

Records the sizes of each source and its location in the user's code. In launches that set the batch size through such a
source, replaces the script's batch size, and nothing else: the sampler, order and seed remain unchanged.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.imports import replace_function
from optuna_dsat.runtime.measure.inputs import leading_dimension
from optuna_dsat.runtime.user_code import Place, is_installed, is_size, place_of

__all__ = ["LoaderWatch"]

_MOST_ATTRIBUTES = 8
"""Maximum number of integer attributes recorded per dataset."""


class LoaderWatch:
    """Records sources of batches; sets the launch's micro-batch in the source selected by ``follow``.

    Args:
        micro_batch: Samples per rank and forward pass in the launch's config; None if unspecified.
        follow: As for ``BatchSources``.
        fed: Returns the number of micro-batches that the engine has received.
        repeat: Whether to restart iterators that feed the engine when they are exhausted.
    """

    def __init__(
        self, *, micro_batch: int | None, follow: Mapping[str, Any], fed: Callable[[], int], repeat: bool
    ) -> None:
        self._micro_batch = micro_batch
        self._own = int(follow["own"]) if follow.get("kind") == "loader" else None
        self._attribute = str(follow["key"]) if follow.get("kind") == "attribute" else None
        self._own_attribute = int(follow.get("own", 0))
        self._fed = fed
        self._repeat = repeat
        self._loaders: list[_Loader] = []
        self._known: set[tuple[Place, str]] = set()
        self.loaded: int | None = None
        """Batch size of the loader that yielded last; None if unknown."""

    def callbacks(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return module name -> function to call when the module has been imported."""
        return {
            "torch.utils.data.dataloader": lambda module: self._watch_loaders(module.DataLoader),
            "torchdata.stateful_dataloader.stateful_dataloader": lambda module: self._watch_loaders(
                module.StatefulDataLoader
            ),
            "torch.utils.data.dataset": self._datasets_of_torch_imported,
            "datasets.arrow_dataset": lambda module: self._datasets_imported(module.Dataset),
            "datasets.iterable_dataset": lambda module: self._datasets_imported(module.IterableDataset),
            "webdataset.filters": self._webdataset_imported,
        }

    def described(self) -> list[dict[str, Any]]:
        """Return the entries of all sources with known sizes for ``BatchSourcesFound.loaders``."""
        return [loader.described() for loader in self._loaders if loader.tells]

    def _watch_loaders(self, loader_class: Any) -> None:
        make, iterate = loader_class.__init__, loader_class.__iter__

        @functools.wraps(make)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - replaces a method
            noted = _Loader(place_of(sys._getframe(1)))
            args, kwargs = noted.sized(args, kwargs, own=self._own, micro_batch=self._micro_batch)
            if noted.unbatched:
                self._size_attributes(kwargs.get("dataset", args[0] if args else None), noted.place)
            make(loader, *args, **kwargs)
            noted.measure(loader)
            loader.__dict__["_optuna_dsat"] = noted
            self._loaders.append(noted)

        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Any:  # noqa: N807 - replaces a method
            return self._iteration(lambda: iterate(loader), loader.__dict__.get("_optuna_dsat"))

        loader_class.__init__ = __init__
        loader_class.__iter__ = __iter__

    def _datasets_of_torch_imported(self, dataset: ModuleType) -> None:
        """Record the user's ``IterableDataset`` classes when they are iterated without a data loader."""
        base = dataset.IterableDataset
        prepare = base.__init_subclass__.__func__

        @functools.wraps(prepare)
        def __init_subclass__(cls: Any, **kwargs: Any) -> None:  # noqa: N807 - replaces a method
            prepare(cls, **kwargs)
            iterate = cls.__dict__.get("__iter__")
            if iterate is not None and not is_installed(iterate.__code__.co_filename):
                cls.__iter__ = self._watching_iteration(iterate)

        base.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[arg-type]

    def _watching_iteration(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @functools.wraps(original)
        def __iter__(stream: Any) -> Iterator[Any]:  # noqa: N807 - replaces a method
            caller = sys._getframe(1)
            if is_installed(caller.f_code.co_filename):  # a data loader, which is observed itself
                self._size_attributes(stream, None)
                return original(stream)
            self._size_attributes(stream, place_of(caller))
            return self._iteration(lambda: original(stream), None)

        return __iter__

    def _size_attributes(self, dataset: Any, place: Place | None) -> None:
        """Record integer attributes of a user's dataset; set the batch-size attribute to the launch's micro-batch.

        Args:
            dataset: The dataset.
            place: Location of its use; None if already recorded.
        """
        kind = type(dataset)
        if is_installed(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<none>"):
            return
        sizes = [(name, value) for name, value in getattr(dataset, "__dict__", {}).items() if is_size(value)]
        for name, value in sizes[:_MOST_ATTRIBUTES]:
            key = f"{kind.__qualname__}.{name}"
            if place is not None and (place, key) not in self._known:
                self._known.add((place, key))
                self._loaders.append(_Loader(place, batch_size=value, attribute=key))
            if key == self._attribute and value == self._own_attribute and self._micro_batch is not None:
                setattr(dataset, name, self._micro_batch)

    def _datasets_imported(self, kind: Any) -> None:
        for name in ("iter", "batch"):
            original = getattr(kind, name, None)
            if original is not None:
                setattr(kind, name, self._sized_method(original, iterates=name == "iter"))

    def _sized_method(self, original: Callable[..., Any], *, iterates: bool) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def sized(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            noted = _Loader(place_of(sys._getframe(1)), batch_size=bound.arguments.get("batch_size"))
            bound.arguments["batch_size"] = self._sized(noted.batch_size, bound.arguments.get("batch_size"))
            noted.samples = _length(bound.args[0])
            self._loaders.append(noted)
            if not iterates:
                return original(*bound.args, **bound.kwargs)
            return self._iteration(lambda: original(*bound.args, **bound.kwargs), noted)

        return sized

    def _webdataset_imported(self, filters: ModuleType) -> None:
        original = filters.batched

        @functools.wraps(original)
        def batched(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.pop("batchsize", args[0] if args else 20)
            noted = _Loader(place_of(sys._getframe(1)), batch_size=given)
            self._loaders.append(noted)
            return original(self._sized(noted.batch_size, given), *args[1:], **kwargs)

        replace_function(filters, "batched", batched)

    def _sized(self, size: int | None, given: Any) -> Any:
        """Return the launch's micro-batch if ``size`` is the script's batch size, else ``given``."""
        return self._micro_batch if size is not None and size == self._own and self._micro_batch else given

    def _iteration(self, start: Callable[[], Iterator[Any]], loader: _Loader | None) -> _Iteration:
        def yielded(batch: Any) -> None:
            size = None if loader is None else loader.batch_size
            self.loaded = None if leading_dimension(batch) is None else size

        return _Iteration(start, loader=loader, fed=self._fed, repeat=self._repeat, yielded=yielded)


class _Loader:
    """Source of batches: its location in the user's code, and its sizes.

    Args:
        place: File and line.
        batch_size: Samples of a batch in the script; None if it is not a valid size.
        attribute: ``CLASS.NAME`` of the dataset's attribute with the batch size; empty for other sources.
    """

    def __init__(self, place: Place, *, batch_size: Any = None, attribute: str = "") -> None:
        self.place = place
        self.batch_size: int | None = batch_size if is_size(batch_size) else None
        self.attribute = attribute
        self.unbatched = False
        """Whether a torch data loader leaves batching to its dataset."""
        self.samples: int | None = None
        """Samples per rank and epoch; None if the dataset has no length."""
        self.loads_all = False
        """Whether each rank loads the whole dataset, because the sampler does not shard it."""
        self.trains = False
        """Whether the engine received inputs during the iteration."""

    def sized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, own: int | None, micro_batch: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a data loader's arguments with batch size ``own`` replaced by the launch's micro-batch."""
        sampler = kwargs.get("batch_sampler", args[4] if len(args) > 4 else None)
        given = getattr(sampler, "batch_size", None) if sampler is not None else None
        if sampler is None:
            given = kwargs.get("batch_size", args[1] if len(args) > 1 else 1)
            self.unbatched = given is None
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
        elif not self.unbatched:
            self.samples = _sampled(batches)
            if self.samples is None:
                self.samples = _length(getattr(loader, "sampler", None))
            sampler = getattr(batches, "sampler", None)
            in_data = _length(getattr(loader, "dataset", None))
            self.loads_all = sampler is not None and not hasattr(sampler, "num_replicas") and self.samples == in_data

    @property
    def tells(self) -> bool:
        """Whether its batch size or number of samples is known."""
        return self.batch_size is not None or self.samples is not None

    def described(self) -> dict[str, Any]:
        """Return its entry for ``BatchSourcesFound.loaders``."""
        return {
            "batch_size": self.batch_size,
            "file": self.place[0],
            "line": self.place[1],
            "attribute": self.attribute,
            "samples": self.samples,
            "loads_all": self.loads_all,
            "trains": self.trains,
        }


class _Iteration:
    """Iterator that restarts when exhausted, if it fed the engine; other iterations end.

    Args:
        start: Starts an iteration.
        loader: Marked as ``trains`` if it feeds the engine; None if it is recorded elsewhere or predates the recording.
        fed: Returns the number of micro-batches that the engine has received.
        repeat: Whether to restart at all.
        yielded: Called with each batch.
    """

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
