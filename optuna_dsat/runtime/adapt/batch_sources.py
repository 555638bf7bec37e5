"""Sources of a script's batch size: parsers, settings files and data loaders.

The profile launch records every integer that the script got from a parser, settings file or data loader. The tuner
compares them with the batch that the engine received, and verifies its guess with a launch at twice the size. In later
launches this module replaces the number if its source is a settings file or data loader; command-line options are
replaced in the arguments instead (``optuna_dsat.script.arg_mapping``).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.adapt.loaders import LoaderWatch
from optuna_dsat.runtime.adapt.parsers import ParserWatch, names_training_batch, numbers
from optuna_dsat.runtime.events import BatchSourcesFound
from optuna_dsat.runtime.files import read_regular
from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.measure.inputs import BatchNumbers
from optuna_dsat.runtime.user_code import Place, is_installed

__all__ = ["BatchSources"]

_MOST = 400
"""Maximum number of recorded numbers per kind of source."""
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
        self._loaders = LoaderWatch(micro_batch=micro_batch, follow=follow, fed=fed, repeat=repeat)
        self._settings: dict[tuple[str, str], int] = {}
        self._texts = _ArgumentTexts()
        self._folder = f"{Path.cwd().resolve()}{os.sep}"  # the script may change the working directory

    def install(self) -> None:
        """Start recording values parsed by argparse; other libraries are patched on import (``callbacks``)."""
        self._parsers.install()

    def callbacks(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return module name -> function to call when the module has been imported."""
        files = dict.fromkeys(("json", "yaml", "tomllib"), self._note_results)
        return {**self._parsers.callbacks(), **self._loaders.callbacks(), **files}

    def event(self, *, rank: int, places: Sequence[Place] = ()) -> BatchSourcesFound:
        """Return everything recorded until now."""
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
        """Return the numbers known so far to be batch sizes."""
        settings = [(key, value) for (_, key), value in self._settings.items()]
        named = {value for name, value in [*self._parsers.options.items(), *settings] if names_training_batch(name)}
        return BatchNumbers(configured=configured, named=named, loaded=self._loaders.loaded)

    def _note_settings(self, source: Any, result: Any) -> None:
        """Record the numbers of a settings file, and replace the batch size selected by ``follow``."""
        if not self._noting and self._follow.get("kind") != "setting":
            return
        file = self._texts.file_of(source) if isinstance(source, str) else _name_of(source)
        followed = self._follow["key"] if file is not None and file == self._follow.get("file") else None
        if file is None or not (self._noting or followed):
            return
        for container, name, key, value in numbers(result):
            self._settings.setdefault((file, key), value)
            if key == followed and self._micro_batch is not None:
                container[name] = self._micro_batch * int(self._follow.get("scale", 1))

    def _note_results(self, module: Any) -> None:
        """Record the settings that functions of a module for JSON, YAML or TOML return."""
        for name in ("load", "loads", "safe_load", "full_load", "unsafe_load"):
            if hasattr(module, name):

                @patch(module, name)
                def noting(original: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
                    result = original(source, *args, **kwargs)
                    self._note_settings(source, result)
                    return result


class _ArgumentTexts:
    """Contents of the settings files in the script's arguments, for scripts that read a file and parse its text."""

    def __init__(self) -> None:
        self._arguments: list[str] | None = None
        self._files: dict[str, str] = {}

    def file_of(self, text: str) -> str | None:
        """Return the absolute path of the file in the arguments that contains exactly this text, or None."""
        if self._arguments != sys.argv:
            self._arguments = list(sys.argv)
            named = {arg.rpartition("=")[2] for arg in sys.argv[1:]}
            self._files = {content: os.path.realpath(name) for name in named if (content := _settings_text(name))}
        return self._files.get(text)


def _settings_text(name: str) -> str:
    """Return the text of a settings file; empty for other suffixes, too large files and anything but regular files.

    Pipes are not read, because the script could not read them again.
    """
    if not name.endswith((".json", ".toml", ".yaml", ".yml")):
        return ""
    try:
        return read_regular(name, most_bytes=_MOST_TEXT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _name_of(source: Any) -> str | None:
    """Return the absolute path of an open file; None for other objects and for files of installed packages."""
    name = getattr(source, "name", None)
    if not isinstance(name, str) or is_installed(name):
        return None
    return os.path.realpath(name)
