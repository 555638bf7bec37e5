"""Where a script's batch size comes from: its parsers, its files, its data loaders.

In the profile launch every whole number that a parser, a settings file or a data loader gave the script is noted. The
tuner compares them with the batch that the engine was fed, and proves its guess by a launch at twice the size. In a
launch whose batch size follows by a file's setting or by the data loader, the number is replaced here; options of the
command line are replaced in the arguments (``optuna_dsat.script.arg_mapping``).
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from optuna_dsat.runtime.events import BatchSourcesFound

__all__ = ["BatchSources"]

_LARGEST = 2**20
"""Samples beyond which a number is no batch size."""
_MOST = 400
"""Numbers of one kind that are noted."""
_DEPTH = 8
"""Levels of a settings file that are looked at."""
_LIBRARIES = ("site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}")
"""Parts of a path that tell an installed module from the user's own."""


class BatchSources:
    """Notes what may set a script's batch size, and has a setting or the data loaders follow the launch's.

    Args:
        micro_batch: Samples per rank and forward pass under the launch's config; None if it does not say.
        follow: What the batch size follows by: ``{"kind": "loader", "own": B}`` or ``{"kind": "setting", "file": F,
            "key": K, "own": B, "scale": S}`` with the script's own number B and the ranks times accumulation S that a
            setting counts; empty if nothing is replaced here.
        fed: Returns how many micro-batches the engine was fed so far.
        noting: Whether settings files are noted: a launch that already knows what it follows reads that one alone.
        repeat: Whether a data loader that feeds the engine begins again instead of ending.
    """

    def __init__(
        self,
        *,
        micro_batch: int | None,
        follow: Mapping[str, Any],
        fed: Callable[[], int],
        repeat: bool,
        noting: bool = True,
    ) -> None:
        self._noting = noting
        self._micro_batch = micro_batch
        self._follow = follow
        self._fed = fed
        self._repeat = repeat
        self._options: dict[str, int] = {}
        self._defaults: dict[str, int] = {}
        self._settings: dict[tuple[str, str], int] = {}
        self._loaders: list[_Loader] = []

    def install(self) -> None:
        """Start noting what argparse parses; other libraries are watched as they are imported (``callbacks``)."""
        original = argparse.ArgumentParser.parse_known_args

        @functools.wraps(original)
        def parse_known_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            found = original(parser, *args, **kwargs)
            values = vars(found[0])
            for action in parser._actions:
                for option in action.option_strings:
                    self._note_option(option, values.get(action.dest))
                    if _is_size(action.default):
                        self._defaults.setdefault(option, action.default)
            return found

        argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]

    def callbacks(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return what to call when a module has been imported, by its name."""
        return {
            "click.core": self._click_imported,
            "typer._click.core": self._click_imported,
            "hydra.core.utils": self._hydra_imported,
            "json": self._json_imported,
            "yaml": self._yaml_imported,
            "tomllib": self._json_imported,
            "torch.utils.data.dataloader": self._torch_imported,
        }

    def event(self, *, rank: int) -> BatchSourcesFound:
        """Return all that was noted until now."""
        return BatchSourcesFound(
            rank=rank,
            time=time.time(),
            options=dict(list(self._options.items())[:_MOST]),
            defaults=dict(list(self._defaults.items())[:_MOST]),
            settings=[
                {"file": file, "key": key, "value": value}
                for (file, key), value in list(self._settings.items())[:_MOST]
            ],
            loaders=[loader.described() for loader in self._loaders if loader.tells][:_MOST],
        )

    def _note_option(self, option: str, value: Any) -> None:
        if _is_size(value):
            self._options.setdefault(option, value)

    def _note_settings(self, source: Any, found: Any) -> None:
        """Note the numbers of a settings file, and replace the one that follows the launch."""
        if not self._noting and self._follow.get("kind") != "setting":
            return
        file = _name_of(source)
        if (
            file is None
            or not (self._noting or file == self._follow["file"])
            or not isinstance(found, MutableMapping | MutableSequence)
        ):
            return
        for holder, name, key, value in _numbers(found):
            self._settings.setdefault((file, key), value)
            if self._follows_setting(file, key) and self._micro_batch is not None:
                holder[name] = self._micro_batch * int(self._follow.get("scale", 1))

    def _follows_setting(self, file: str, key: str) -> bool:
        follow = self._follow
        return follow.get("kind") == "setting" and follow.get("file") == file and follow.get("key") == key

    def _click_imported(self, core: ModuleType) -> None:
        original = core.Command.make_context

        @functools.wraps(original)
        def make_context(command: Any, *args: Any, **kwargs: Any) -> Any:
            context = original(command, *args, **kwargs)
            for param in getattr(command, "params", ()):
                dashed = [option for option in getattr(param, "opts", ()) if option.startswith("-")]
                if dashed:
                    self._note_option(max(dashed, key=len), context.params.get(param.name))
            return context

        core.Command.make_context = make_context

    def _hydra_imported(self, utils: ModuleType) -> None:
        original = utils.run_job

        @functools.wraps(original)
        def run_job(*args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("config") if "config" in kwargs else (args[1] if len(args) > 1 else None)
            omegaconf = sys.modules.get("omegaconf")
            if omegaconf is not None and config is not None:
                plain = omegaconf.OmegaConf.to_container(config, resolve=False)
                for _, _, key, value in _numbers(plain):
                    if not key.startswith("hydra."):
                        self._note_option(f"{key}=", value)
            return original(*args, **kwargs)

        utils.run_job = run_job  # type: ignore[attr-defined]

    def _json_imported(self, module: ModuleType) -> None:
        _after(module, "load", self._note_settings)

    def _yaml_imported(self, module: ModuleType) -> None:
        for name in ("load", "safe_load", "full_load", "unsafe_load"):
            _after(module, name, self._note_settings)

    def _torch_imported(self, dataloader: ModuleType) -> None:
        loader_class = dataloader.DataLoader
        make, iterate = loader_class.__init__, loader_class.__iter__

        @functools.wraps(make)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - takes the place of one
            noted = _Loader(_caller(sys._getframe(1)))
            args, kwargs = noted.sized(args, kwargs, own=self._own_loader(), micro_batch=self._micro_batch)
            make(loader, *args, **kwargs)
            noted.measure(loader)
            loader.__dict__["_optuna_dsat"] = noted
            self._loaders.append(noted)

        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Any:  # noqa: N807 - takes the place of one
            return self._iterated(loader, iterate)

        loader_class.__init__ = __init__
        loader_class.__iter__ = __iter__

    def _own_loader(self) -> int | None:
        return int(self._follow["own"]) if self._follow.get("kind") == "loader" else None

    def _iterated(self, loader: Any, iterate: Callable[[Any], Any]) -> _Iteration:
        noted = loader.__dict__.get("_optuna_dsat")
        return _Iteration(lambda: iterate(loader), loader=noted, fed=self._fed, repeat=self._repeat)


class _Loader:
    """One data loader: where it was made, and its sizes."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.file, self.line = place
        self.batch_size: int | None = None
        """Samples of a batch as the script says; None if it says none."""
        self.samples: int | None = None
        """Samples of one rank in an epoch; None if the data set does not tell."""
        self.trains = False
        """Whether the engine was fed while it was iterated."""

    def sized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, own: int | None, micro_batch: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the loader's arguments with the launch's micro-batch if they say the script's own."""
        sampler = kwargs.get("batch_sampler", args[4] if len(args) > 4 else None)
        given = getattr(sampler, "batch_size", None) if sampler is not None else None
        if sampler is None:
            given = kwargs.get("batch_size", args[1] if len(args) > 1 else 1)
        self.batch_size = given if _is_size(given) else None
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
        """Note how many samples a rank gets in an epoch."""
        batches: Any = getattr(loader, "batch_sampler", None)
        if hasattr(batches, "samples_per_rank"):  # a ``DeepSpeedTrial``'s, which shards by itself
            self.samples = batches.samples_per_rank
            return
        source = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
        try:
            self.samples = len(source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError, AttributeError):
            self.samples = None

    @property
    def tells(self) -> bool:
        """Whether anything is known of it."""
        return self.batch_size is not None or self.samples is not None

    def described(self) -> dict[str, Any]:
        """Return what the event says of it."""
        return {
            "batch_size": self.batch_size,
            "file": self.file,
            "line": self.line,
            "samples": self.samples,
            "trains": self.trains,
        }


class _Iteration:
    """An iteration over a data loader that fed the engine begins again where it would end; others end.

    Args:
        start: Begins one.
        loader: Told that it feeds the engine; None for a loader that was made before the recording.
        fed: Returns how many micro-batches the engine was fed so far.
        repeat: Whether to begin again at all.
    """

    def __init__(
        self, start: Callable[[], Iterator[Any]], *, loader: _Loader | None, fed: Callable[[], int], repeat: bool
    ) -> None:
        self._start = start
        self._loader = loader
        self._fed = fed
        self._repeat = repeat
        self._before = fed()
        self._inner = start()

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
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


def _after(module: ModuleType, name: str, note: Callable[[Any, Any], None]) -> None:
    """Have a function that reads its first argument tell what it returned."""
    original = getattr(module, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def noting(source: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(source, *args, **kwargs)
        note(source, found)
        return found

    setattr(module, name, noting)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST


def _name_of(source: Any) -> str | None:
    """Return the absolute path of an open file; None for anything else, and for files of installed packages."""
    name = getattr(source, "name", None)
    if not isinstance(name, str) or _is_installed(name):
        return None
    return os.path.realpath(name)


def _numbers(found: Any, prefix: str = "", depth: int = 0) -> Iterable[tuple[Any, Any, str, int]]:
    """Yield (holder, name in it, dotted key, value) of every whole number in nested mappings and lists."""
    if depth > _DEPTH:
        return
    items = found.items() if isinstance(found, Mapping) else enumerate(found)
    for name, value in list(items):
        key = f"{prefix}.{name}" if prefix else str(name)
        if _is_size(value):
            yield found, name, key, value
        elif isinstance(value, MutableMapping | MutableSequence):
            yield from _numbers(value, key, depth + 1)


def _is_installed(file: str) -> bool:
    return any(part in _LIBRARIES for part in Path(file).parts)


def _caller(frame: FrameType | None) -> tuple[str, int]:
    """Return file and line of the user's code that leads here; that of the innermost frame if none is the user's."""
    innermost = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not _is_installed(file) and "optuna_dsat" not in Path(file).parts:
            return file, frame.f_lineno
        frame = frame.f_back
    return innermost
