"""Sources of a script's batch size: parsers, settings files and data loaders.

The profile launch records every integer that the script got from a parser, settings file or data loader. The tuner
compares them with the batch that the engine received, and verifies its guess with a launch at twice the size. In later
launches this module replaces the number if its source is a settings file or data loader; command-line options are
replaced in the arguments instead (``optuna_dsat.script.arg_mapping``). Nothing else of a loader changes: the sampler,
order and seed remain.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.adapt.parsers import ParserWatch, names_training_batch, numbers
from optuna_dsat.runtime.adapt.queues import QUEUE_MODULES, ReadAheadQueues
from optuna_dsat.runtime.adapt.regroup import RegroupedBatches, RegroupedIndices, RepeatedInputs
from optuna_dsat.runtime.events import BatchSourcesFound
from optuna_dsat.runtime.files import read_regular
from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.measure.inputs import BatchNumbers, attributes_in, shaped_tensors
from optuna_dsat.runtime.user_code import Place, is_installed, is_size, place_of

_MOST = 400
"""Maximum number of recorded numbers per kind of source, and per settings file."""
_READ_AHEAD = 8
"""Most batches that a trainer or script reads ahead of the engine: accelerate 1, prefetchers to a GPU a few."""
_SETTINGS = (".json", ".toml", ".yaml", ".yml")
"""Suffixes of settings files."""
_MOST_TEXT_BYTES = 2**20
"""Maximum size of a settings file that is compared with parsed texts; larger files contain data."""


class BatchSources:
    """Records sources of a script's batch size, and sets the launch's batch size in the selected source.

    Args:
        micro_batch: Samples per rank and forward pass in the launch's config; None if unspecified.
        follow: The source to change, with the script's original number B: ``{"kind": "loader", "own": B}``, or
            ``{"kind": "setting", "file": F, "key": K, "own": B, "scale": S}``, where a setting counts S micro-batches
            (ranks times accumulation). Empty to change nothing. May also contain ``rows`` of ``sample_counter``.
        fed: Returns the number of micro-batches that the engine has received.
        noting: Whether to record settings files; False if ``follow`` is known, so that only its file is read.
        repeat: Whether to restart data loaders that feed the engine when they are exhausted.
        outputs: Folder for the output of a Hydra run; None to keep the script's.
    """

    def __init__(
        self,
        *,
        micro_batch: int | None,
        follow: Mapping[str, Any],
        fed: Callable[[], int],
        repeat: bool,
        noting: bool = True,
        outputs: Path | None = None,
    ) -> None:
        self._noting = noting
        self._micro_batch = micro_batch
        self._follow = follow
        self._parsers = ParserWatch(outputs=outputs)
        self._fed = fed
        self._repeat = repeat
        self._loaders: list[_Loader] = []
        self._loaded: int | None = None
        """Samples of the batch that a loader yielded last; None if unknown."""
        self._recent: deque[int] = deque(maxlen=_READ_AHEAD + 1)
        """Samples of the latest batches."""
        self._drawn = 0
        """Samples of all batches of loaders that feed the engine, or of all loaders before the second batch."""
        self._packed: int | None = None
        """Samples of its batch, if its rows are not samples (texts packed for flash attention, nodes of graphs)."""
        self._settings: dict[tuple[str, str], int] = {}
        self._opened: list[str] = []
        """Settings files of the working folder, or of arguments, that the script has opened."""
        self._texts: dict[str, str] = {}
        """Content of each of them -> its path."""
        self._folder = f"{Path.cwd().resolve()}{os.sep}"  # the script may change the working directory
        self._queues = ReadAheadQueues()
        self._scale = Fraction(1)
        """Ratio of the present batch size to the one that loaders were made with."""
        self.repeated = RepeatedInputs(scale=self._scale_of_fixed_inputs)
        """Repeats inputs that the script makes once."""

    def install(self) -> None:
        """Start recording values parsed by argparse; other libraries are patched on import (``callbacks``)."""
        self._parsers.install()
        checks = iter(range(1, _MOST))  # data have no end

        def note_opened(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(args[0], str) and args[0].endswith(_SETTINGS) and next(checks, 0):
                given = (os.path.realpath(word.rpartition("=")[2]) for word in sys.argv)
                if (path := os.path.realpath(args[0])).startswith(self._folder) or path in given:
                    self._opened.append(path)

        sys.addaudithook(note_opened)

    def callbacks(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return module name -> function to call when the module has been imported."""
        files = dict.fromkeys(("json", "yaml", "tomllib"), self._note_results)
        loaders = {
            "torch.utils.data.dataloader": lambda module: self._watch_loaders(module.DataLoader),
            "torchdata.stateful_dataloader.stateful_dataloader": lambda module: self._watch_loaders(
                module.StatefulDataLoader
            ),
        }
        queues = dict.fromkeys(QUEUE_MODULES, lambda module: self._queues.watch(module.Queue))
        return {**self._parsers.callbacks(), **loaders, **files, **queues}

    def event(self, *, rank: int, places: Sequence[Place] = ()) -> BatchSourcesFound:
        """Return everything recorded until now."""
        known = [loader for loader in self._loaders if loader.batch_size is not None or loader.samples is not None]
        if not any(loader.trains for loader in known):  # its batches were read ahead of the engine's first steps
            for loader in known:
                iteration = loader.iteration()
                loader.trains = iteration is not None and iteration.feeds
        loaders = [loader.described() for loader in known]
        return BatchSourcesFound(
            rank=rank,
            time=time.time(),
            options=dict(list(self._parsers.numbers().items())[:_MOST]),
            defaults=dict(list(self._parsers.defaults.items())[:_MOST]),
            choices=self._parsers.choices,
            settings=[
                {"file": file.removeprefix(self._folder), "key": key, "value": value}
                for (file, key), value in list(self._settings.items())[:_MOST]
            ],
            loaders=loaders[:_MOST],
            fed_at=[{"file": file, "line": line} for file, line in places],
        )

    def numbers(self, configured: Set[int]) -> BatchNumbers:
        """Return the numbers known so far to be batch sizes."""
        settings = [(key, value) for (_, key), value in self._settings.items()]
        named = {value for name, value in [*self._parsers.numbers().items(), *settings] if names_training_batch(name)}
        return BatchNumbers(
            configured, named, loaded=self._loaded, recent={*self._recent}, drawn=self._drawn, packed=self._packed
        )

    def rescale(self, ratio: Fraction) -> int:
        """Multiply the batch size of the data loaders that feed the engine, also within an iteration.

        Batches that workers have prefetched are skipped. Without such a loader, fixed inputs are repeated.

        Returns:
            Most batches that may still have the earlier size: as many as the workers of a loader prefetch, and some
            that are read ahead; 0 without a data loader of torch.
        """
        self._scale *= ratio
        feeding = [loader for loader in self._loaders if loader.trains] or self._loaders  # none after a single batch
        for loader in feeding:
            loader.to_skip = loader.prefetched
        return max((loader.prefetched + _READ_AHEAD for loader in feeding), default=0)

    def skip_read_ahead(self) -> None:
        """Have loaders skip as many training batches as their workers may have read ahead, and hold back queued ones.

        They were read while the script started: steps with them would show the model's speed where the workers are
        slower. The number of a loader's is the same in every launch, and so are the data of its steps.
        """
        for loader in self._loaders:
            loader.to_skip = loader.prefetched
        self._queues.hold_back()

    def _scale_of_fixed_inputs(self) -> Fraction:
        """Return the ratio for inputs that no loader yields; a loader's batch that is fed twice has its size."""
        return Fraction(1) if any(loader.trains for loader in self._loaders) else self._scale

    def _note_settings(self, source: Any, result: Any) -> None:
        """Record the numbers of a settings file, and replace the batch size selected by ``follow``."""
        notes = self._noting and len(self._settings) < _MOST  # data have no end
        if not notes and self._follow.get("kind") != "setting":
            return
        file = self._file_of(source)
        followed = self._follow["key"] if file is not None and file == self._follow.get("file") else None
        if file is None or not (notes or followed):
            return
        for container, name, key, value in islice(numbers(result), _MOST):
            self._settings.setdefault((file, key), value)
            if key == followed and self._micro_batch is not None:
                container[name] = self._micro_batch * int(self._follow.get("scale", 1))

    def _file_of(self, source: Any) -> str | None:
        """Return the path of the settings file that a script parses, from an open file or its text; None for others.

        Pipes are not read for comparison, because the script could not read them again.
        """
        if not isinstance(source, str):
            name = getattr(source, "name", None)
            return os.path.realpath(name) if isinstance(name, str) and not is_installed(name) else None
        opened, self._opened = self._opened, []
        for name in {*opened} - {*self._texts.values()}:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self._texts[read_regular(name, most_bytes=_MOST_TEXT_BYTES).decode("utf-8")] = name
        self._opened.clear()  # opened here
        return self._texts.get(source)

    def _note_results(self, module: Any) -> None:
        """Record the settings that functions of a module for JSON, YAML or TOML return."""
        for name in ("load", "loads", "safe_load", "full_load", "unsafe_load"):
            if hasattr(module, name):

                @patch(module, name)
                def noting(original: Any, *args: Any, **kwargs: Any) -> Any:
                    result = original(*args, **kwargs)
                    self._note_settings(next(iter((*args, *kwargs.values()))), result)
                    return result

    def _watch_loaders(self, loader_class: Any) -> None:
        """Record data loaders; set the launch's micro-batch in loaders of the script's batch size."""
        size = int(self._follow["own"]) if self._follow.get("kind") == "loader" else None

        @patch(loader_class, "__init__")
        def init(original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            noted = _Loader(place_of(sys._getframe(1)))
            args, kwargs = noted.sized(args, kwargs, size=size, micro_batch=self._micro_batch)
            original(loader, *args, **kwargs)
            noted.measure(loader)
            loader.__dict__["_optuna_dsat"] = noted
            self._loaders.append(noted)

        if self._repeat and "_index_sampler" in vars(loader_class):
            self._regroup_indices(loader_class)

        @patch(loader_class, "__iter__")
        def iterate(original: Any, loader: Any) -> Any:
            noted = loader.__dict__.get("_optuna_dsat")

            def yielded(batch: Any) -> None:
                self._loaded = self._packed = None
                taken = noted.taken.popleft() if noted is not None and noted.taken else None
                if noted is not None and noted.made_with is not None:
                    tensors = shaped_tensors(batch) or shaped_tensors(attributes_in(batch))
                    rows = [int(tensor.shape[0]) for tensor in tensors]
                    self._loaded = min([taken or noted.made_with, *(rows[:1] if noted.stacks else ())])
                    self._recent.append(self._loaded)
                    if noted.trains or not any(loader.trains for loader in self._loaders):
                        self._drawn += self._loaded
                    self._packed = self._loaded if noted.packs(rows, loaded=self._loaded) else None

            def begin() -> Any:
                if noted is not None:
                    noted.taken.clear()
                batches = original(loader)
                if not self._repeat or noted is None or noted.is_indexed(loader):
                    return batches
                return RegroupedBatches(batches, scale=lambda: self._scale_of(noted))

            iteration = _Iteration(begin, loader=noted, fed=self._fed, repeat=self._repeat, yielded=yielded)
            if noted is not None:
                noted.iteration = weakref.ref(iteration)
            return iteration

    def _scale_of(self, loader: _Loader | None) -> Fraction:
        return self._scale if loader is not None and loader.trains else Fraction(1)

    def _regroup_indices(self, loader_class: Any) -> None:
        """Have data loaders take indices from their own batches, in lists of the present batch size."""
        index_sampler = loader_class._index_sampler

        def regrouped(loader: Any) -> Any:
            batches, noted = index_sampler.fget(loader), loader.__dict__.get("_optuna_dsat")
            if noted is None or not noted.is_indexed(loader):
                return batches
            return RegroupedIndices(batches, scale=lambda: self._scale_of(noted), taken=noted.taken.append)

        loader_class._index_sampler = property(regrouped)


class _Loader:
    """A data loader: its location in the user's code, and its sizes."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.batch_size: int | None = None
        """Samples of a batch in the script; None if the dataset yields batches."""
        self.made_with: int | None = None
        """Samples of a batch that it was made with, the launch's micro-batch or ``batch_size``."""
        self._packs: bool | None = None
        """Whether the rows of a batch are not its samples: one row, or no multiple of them; None if unknown."""
        self._most_rows = 0
        """Rows of the largest batch so far: a last batch has fewer, and no multiple of the samples either."""
        self.samples: int | None = None
        """Samples per rank and epoch; None if the dataset has no length, or yields batches."""
        self.loads_all = False
        """Whether each rank loads the whole dataset, because the sampler does not shard it."""
        self.trains = False
        """Whether the engine received inputs during the iteration."""
        self.iteration: Callable[[], _Iteration | None] = lambda: None
        """The latest iteration; None once the script has dropped it."""
        self.prefetched = 0
        """Batches that its workers have ready or in preparation."""
        self.to_skip = 0
        """Batches to read that the script does not get."""
        self.taken: deque[int] = deque()
        """Samples of the batches in preparation; of a dataset without indices, the last may have fewer."""
        self.stacks = False
        """Whether the rows of a batch are its samples: torch collates them."""

    def sized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, size: int | None, micro_batch: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a data loader's arguments with the batch size ``size`` replaced by the launch's micro-batch."""
        sampler = kwargs.get("batch_sampler", args[4] if len(args) > 4 else None)
        given = kwargs.get("batch_size", args[1] if len(args) > 1 else 1)
        if sampler is given is None:  # the sampler may yield lists of indices, of which the dataset makes batches
            sampler = kwargs.get("sampler", args[3] if len(args) > 3 else None)
        if sampler is not None:
            given = getattr(sampler, "batch_size", None)
        self.batch_size = self.made_with = given if is_size(given) else None
        if size is None or micro_batch is None or self.batch_size != size:
            return args, kwargs
        self.made_with = micro_batch
        if sampler is not None:
            sampler.batch_size = micro_batch
        elif "batch_size" in kwargs or len(args) <= 1:
            kwargs = {**kwargs, "batch_size": micro_batch}
        else:
            args = (args[0], micro_batch, *args[2:])
        return args, kwargs

    def packs(self, sizes: Sequence[int], *, loaded: int) -> bool:
        """Return whether the rows of a batch are not its samples; not of a short last batch.

        ``sizes`` are the leading dimensions of its tensors: the rows, and perhaps labels or cumulative lengths.
        ``loaded`` are its samples.
        """
        made_with, rows = self.made_with, next(iter(sizes), None)
        if made_with is None or rows is None:
            return False
        if not self._packs and loaded == made_with and rows > max(1, self._most_rows):
            self._most_rows = rows
            is_other = made_with in sizes or (made_with > 1 and (rows % made_with > 0 or made_with + 1 in sizes))
            self._packs = made_with < rows and is_other
        elif self._packs is None and loaded == made_with > 1:
            self._packs = self.samples is None or self.samples >= made_with
        return bool(self._packs)

    def is_indexed(self, loader: Any) -> bool:
        """Return whether a sampler yields lists of indices; otherwise the dataset yields batches."""
        return self.made_with is not None or getattr(loader, "_auto_collation", True)

    def measure(self, loader: Any) -> None:
        """Record the batches that workers prefetch, and the samples per rank and epoch unless the dataset batches."""
        self.stacks = getattr(getattr(loader, "collate_fn", None), "__name__", "") == "default_collate"
        self.prefetched = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 0)
        batches: Any = getattr(loader, "batch_sampler", None)
        if batches is None and self.made_with is not None:
            batches = getattr(loader, "sampler", None)
        if hasattr(batches, "samples_per_rank"):  # the batch sampler of a ``DeepSpeedTrial``, which shards
            self.samples = batches.samples_per_rank
        elif batches is not None:
            self.samples = _sampled(batches)
            sampler = getattr(batches, "sampler", None)
            if self.samples is None:  # the sampler that the loader makes and does not use: over the whole dataset
                sampler = getattr(loader, "sampler", None)
                self.samples = length_of(sampler)
            in_data = length_of(getattr(loader, "dataset", None))
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

    @property
    def feeds(self) -> bool:
        """Whether the engine received inputs since it began."""
        return self._fed() > self._before

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        while self._loader is not None and self._loader.to_skip and self.feeds:
            self._loader.to_skip -= 1
            self._yielded(self._next())
        batch = self._next()
        self._yielded(batch)
        return batch

    def _next(self) -> Any:
        feeds = self.feeds
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
        return length_of(sampler)
    count = length_of(batches)
    size: Any = getattr(batches, "batch_size", None)
    if count is None or not is_size(size):
        return None
    parts = batches.num_processes if getattr(batches, "split_batches", False) else 1  # a batch is split among all ranks
    return count * int(size) // int(parts)


def length_of(source: Any) -> int | None:
    """Return the length of a loader, sampler or dataset; None for one without any."""
    try:
        return len(source)
    except Exception:  # noqa: BLE001 - a class of the script may raise anything for a length that it does not know
        return None
