"""Watches what makes batches: data loaders of torch, ``datasets``, ``webdataset``, data sets that batch by themselves.

Each is noted with its place in the user's code and its sizes. In a launch whose batch size follows by one of them, the
script's own size is replaced here, and nothing else: sampler, order and seed stay the script's.
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
"""Whole numbers of one data set that are noted."""


class LoaderWatch:
    """Notes what makes batches, and gives it the launch's micro-batch if that is how the batch size follows.

    Args:
        micro_batch: Samples per rank and forward pass under the launch's config; None if it does not say.
        follow: As for ``BatchSources``.
        fed: Returns how many micro-batches the engine was fed so far.
        repeat: Whether what feeds the engine begins again instead of ending.
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
        """What a loader yielded last; None if its batch size is not known."""

    def callbacks(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return what to call when a module has been imported, by its name."""
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
        """Return what the event says of all that is known."""
        return [loader.described() for loader in self._loaders if loader.tells]

    def _watch_loaders(self, loader_class: Any) -> None:
        make, iterate = loader_class.__init__, loader_class.__iter__

        @functools.wraps(make)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - takes the place of one
            noted = _Loader(place_of(sys._getframe(1)))
            args, kwargs = noted.sized(args, kwargs, own=self._own, micro_batch=self._micro_batch)
            if noted.unbatched:
                self._size_attributes(kwargs.get("dataset", args[0] if args else None), noted.place)
            make(loader, *args, **kwargs)
            noted.measure(loader)
            loader.__dict__["_optuna_dsat"] = noted
            self._loaders.append(noted)

        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Any:  # noqa: N807 - takes the place of one
            return self._iteration(lambda: iterate(loader), loader.__dict__.get("_optuna_dsat"))

        loader_class.__init__ = __init__
        loader_class.__iter__ = __iter__

    def _datasets_of_torch_imported(self, dataset: ModuleType) -> None:
        """Have sets that are classes of the user's, and are iterated without a data loader, noted as they are."""
        base = dataset.IterableDataset
        prepare = base.__init_subclass__.__func__

        @functools.wraps(prepare)
        def __init_subclass__(cls: Any, **kwargs: Any) -> None:  # noqa: N807 - takes the place of one
            prepare(cls, **kwargs)
            iterate = cls.__dict__.get("__iter__")
            if iterate is not None and not is_installed(iterate.__code__.co_filename):
                cls.__iter__ = self._watching_iteration(iterate)

        base.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[arg-type]

    def _watching_iteration(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @functools.wraps(original)
        def __iter__(stream: Any) -> Iterator[Any]:  # noqa: N807 - takes the place of one
            caller = sys._getframe(1)
            if is_installed(caller.f_code.co_filename):  # a data loader, which is watched itself
                self._size_attributes(stream, None)
                return original(stream)
            self._size_attributes(stream, place_of(caller))
            return self._iteration(lambda: original(stream), None)

        return __iter__

    def _size_attributes(self, dataset: Any, place: Place | None) -> None:
        """Note the whole numbers that a set of the user's holds, and replace the one that follows the launch.

        Args:
            dataset: The data set.
            place: Where it is used; None if that is noted already.
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
        """Return the launch's micro-batch in place of the script's own size, else what was given."""
        return self._micro_batch if size is not None and size == self._own and self._micro_batch else given

    def _iteration(self, start: Callable[[], Iterator[Any]], loader: _Loader | None) -> _Iteration:
        def yielded(batch: Any) -> None:
            size = None if loader is None else loader.batch_size
            self.loaded = None if leading_dimension(batch) is None else size

        return _Iteration(start, loader=loader, fed=self._fed, repeat=self._repeat, yielded=yielded)


class _Loader:
    """Something that makes batches: where it is in the user's code, and its sizes.

    Args:
        place: File and line.
        batch_size: Samples of a batch as the script says; anything else than a size counts as None.
        attribute: Class and name of the attribute of a data set that says so; empty if none does.
    """

    def __init__(self, place: Place, *, batch_size: Any = None, attribute: str = "") -> None:
        self.place = place
        self.batch_size: int | None = batch_size if is_size(batch_size) else None
        self.attribute = attribute
        self.unbatched = False
        """Whether a data loader of torch leaves the batches to its data set."""
        self.samples: int | None = None
        """Samples of one rank in an epoch; None if the data set does not tell."""
        self.loads_all = False
        """Whether a rank's samples are all of its data set, by a sampler that divides them among no ranks."""
        self.trains = False
        """Whether the engine was fed while it was iterated."""

    def sized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, own: int | None, micro_batch: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a data loader's arguments with the launch's micro-batch if they say the script's own."""
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
        """Note how many samples a rank gets in an epoch; what is not batched by the loader is not counted by it."""
        batches: Any = getattr(loader, "batch_sampler", None)
        if hasattr(batches, "samples_per_rank"):  # a ``DeepSpeedTrial``'s, which shards by itself
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
        """Whether anything is known of it."""
        return self.batch_size is not None or self.samples is not None

    def described(self) -> dict[str, Any]:
        """Return what the event says of it."""
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
    """An iteration that fed the engine begins again where it would end; others end.

    Args:
        start: Begins one.
        loader: Told that it feeds the engine; None for one that is noted otherwise, or was made before the recording.
        fed: Returns how many micro-batches the engine was fed so far.
        repeat: Whether to begin again at all.
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
    """Return how many samples a batch sampler yields to a rank; None if it does not tell.

    One without a sampler of samples under it, such as accelerate's that shards another one, tells its batches alone.
    """
    sampler = getattr(batches, "sampler", None)
    if sampler is not None:
        return _length(sampler)
    count = _length(batches)
    size: Any = getattr(batches, "batch_size", None)
    if count is None or not is_size(size):
        return None
    parts = batches.num_processes if getattr(batches, "split_batches", False) else 1  # a batch is that of all ranks
    return count * int(size) // int(parts)


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError, AttributeError):
        return None
