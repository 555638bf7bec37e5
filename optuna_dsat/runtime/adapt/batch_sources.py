"""Where a script's batch size comes from: its parsers, its files, what makes its batches.

In the profile launch every whole number that a parser, a settings file or a data loader gave the script is noted. The
tuner compares them with the batch that the engine was fed, and proves its guess by a launch at twice the size. In a
launch whose batch size follows by a file's setting or by what makes the batches, the number is replaced here; options
of the command line are replaced in the arguments (``optuna_dsat.script.arg_mapping``).
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.adapt.loaders import LoaderWatch
from optuna_dsat.runtime.adapt.parsers import ParserWatch, names_training_batch, numbers
from optuna_dsat.runtime.events import BatchSourcesFound
from optuna_dsat.runtime.files import read_regular
from optuna_dsat.runtime.measure.inputs import BatchNumbers
from optuna_dsat.runtime.user_code import Place, is_installed

__all__ = ["BatchSources"]

_MOST = 400
"""Numbers of one kind that are noted."""
_MOST_TEXT_BYTES = 2**20
"""Size of a settings file that is compared with what the script parses; data are larger."""


class BatchSources:
    """Notes what may set a script's batch size, and has a setting or the data loaders follow the launch's.

    Args:
        micro_batch: Samples per rank and forward pass under the launch's config; None if it does not say.
        follow: What the batch size follows by, with the script's own number B: ``{"kind": "loader", "own": B}``,
            ``{"kind": "attribute", "key": "CLASS.NAME", "own": B}`` of a data set, or ``{"kind": "setting", "file": F,
            "key": K, "own": B, "scale": S}`` with the ranks times accumulation S that a setting counts; empty if
            nothing is replaced here. ``rows`` and samples, as of ``sample_counter``, may be there, too.
        fed: Returns how many micro-batches the engine was fed so far.
        noting: Whether settings files are noted: a launch that already knows what it follows reads that one alone.
        repeat: Whether a data loader that feeds the engine begins again instead of ending.
        outputs: Folder that receives what Hydra writes of a run; None to leave that as the script says.
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
        self._loaders = LoaderWatch(micro_batch=micro_batch, follow=follow, fed=fed, repeat=repeat)
        self._settings: dict[tuple[str, str], int] = {}
        self._texts = _ArgumentTexts()
        self._folder = f"{Path.cwd().resolve()}{os.sep}"  # the script may change its own

    def install(self) -> None:
        """Start noting what argparse parses; other libraries are watched as they are imported (``callbacks``)."""
        self._parsers.install()

    def callbacks(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return what to call when a module has been imported, by its name."""
        files = {"json": self._json_imported, "yaml": self._yaml_imported, "tomllib": self._json_imported}
        return {**self._parsers.callbacks(), **self._loaders.callbacks(), **files}

    def event(self, *, rank: int, places: Sequence[Place] = ()) -> BatchSourcesFound:
        """Return all that was noted until now.

        Args:
            rank: Global rank.
            places: Places of the user's code that led to the engine's first input, the innermost first.
        """
        return BatchSourcesFound(
            rank=rank,
            time=time.time(),
            options=dict(list(self._parsers.options.items())[:_MOST]),
            defaults=dict(list(self._parsers.defaults.items())[:_MOST]),
            choices=self._parsers.choices,
            settings=[
                {"file": file.removeprefix(self._folder), "key": key, "value": value}
                for (file, key), value in list(self._settings.items())[:_MOST]
            ],
            loaders=self._loaders.described()[:_MOST],
            fed_at=[{"file": file, "line": line} for file, line in places],
        )

    def numbers(self, configured: Set[int]) -> BatchNumbers:
        """Return the numbers that are known by now to mean samples of a batch.

        Args:
            configured: Micro-batches of the launch's config and of the script's own.
        """
        settings = [(key, value) for (_, key), value in self._settings.items()]
        named = {value for name, value in [*self._parsers.options.items(), *settings] if names_training_batch(name)}
        return BatchNumbers(configured=configured, named=named, loaded=self._loaders.loaded)

    def _note_settings(self, source: Any, found: Any) -> None:
        """Note the numbers of a settings file, and replace the one that follows the launch."""
        if not self._noting and self._follow.get("kind") != "setting":
            return
        file = self._texts.file_of(source) if isinstance(source, str) else _name_of(source)
        if (
            file is None
            or not (self._noting or file == self._follow["file"])
            or not isinstance(found, MutableMapping | MutableSequence)
        ):
            return
        for holder, name, key, value in numbers(found):
            self._settings.setdefault((file, key), value)
            if self._follows_setting(file, key) and self._micro_batch is not None:
                holder[name] = self._micro_batch * int(self._follow.get("scale", 1))

    def _follows_setting(self, file: str, key: str) -> bool:
        follow = self._follow
        return follow.get("kind") == "setting" and follow.get("file") == file and follow.get("key") == key

    def _json_imported(self, module: ModuleType) -> None:
        for name in ("load", "loads"):
            _after(module, name, self._note_settings)

    def _yaml_imported(self, module: ModuleType) -> None:
        for name in ("load", "safe_load", "full_load", "unsafe_load"):
            _after(module, name, self._note_settings)


class _ArgumentTexts:
    """Texts of the settings files that the script's arguments name, for scripts that parse what they have read."""

    def __init__(self) -> None:
        self._arguments: list[str] | None = None
        self._files: dict[str, str] = {}

    def file_of(self, text: str) -> str | None:
        """Return the absolute path of the file that has a text; None if no argument names one."""
        if self._arguments != sys.argv:
            self._arguments = list(sys.argv)
            named = {arg.rpartition("=")[2] for arg in sys.argv[1:]}
            self._files = {read: os.path.realpath(name) for name in named if (read := _settings_text(name))}
        return self._files.get(text)


def _settings_text(name: str) -> str:
    """Return the text of a settings file; empty if the name is none's, or what has it is too large for one, or no file.

    What is in a pipe is for the script, which could not read it after.
    """
    if not name.endswith((".json", ".toml", ".yaml", ".yml")):
        return ""
    try:
        return read_regular(name, most_bytes=_MOST_TEXT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


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


def _name_of(source: Any) -> str | None:
    """Return the absolute path of an open file; None for anything else, and for files of installed packages."""
    name = getattr(source, "name", None)
    if not isinstance(name, str) or is_installed(name):
        return None
    return os.path.realpath(name)
