"""Read user files, also from a pipe, and check that their values can be stored and passed on."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.files import storable

_LARGEST_INTEGER = 2**63 - 1
_MOST_VALUES = 100_000
_MOST_SHOWN = 120
"""Characters of a value in a message."""


def as_written(value: Any) -> str:
    """Format a value for a message as in its file (``null``, ``true``), text in single quotes; long values are cut."""
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError):  # passed by Python code: keys of other types, circular references
        text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a pipe, such as ``<(...)`` of a shell, whose content can be read only once."""
    try:
        return stat.S_ISFIFO(Path(path).stat().st_mode)
    except (OSError, ValueError):
        return False


def read_document(path: str | os.PathLike[str], error: Callable[[str], UsageError] = UsageError) -> bytes:
    """Return the content of a file or pipe; the content of a pipe is cached, because it can be read only once.

    Raises:
        OSError: If it cannot be opened or read.
        UsageError: If it is neither file nor pipe.
    """
    text = os.fspath(path)
    if "\x00" in text:
        raise error("A path has no NUL character.")
    status = Path(text).stat()
    kind = stat.S_IFMT(status.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO) and text != os.devnull:
        raise error(f"{path} is not a file: it is a device or a socket.")
    pipe = (os.path.realpath(text), status.st_ino)
    if pipe in _pipes:
        return _pipes[pipe]
    content = Path(text).read_bytes()
    if kind == stat.S_IFIFO:
        _pipes[pipe] = content
    return content


_pipes: dict[tuple[str, int], bytes] = {}
"""Pipe -> its content, read by this process."""


def checked(data: Any, where: str, error: Callable[[str], UsageError] = UsageError) -> Any:
    """Return the data of a document, which messages call ``where``, if its values can be stored and passed on.

    Raises:
        UsageError: If there are too many values, or endlessly many, a number is too large, or text cannot be a
            command-line argument.
    """
    left: list[tuple[tuple[Any, ...], Any]] = [((), data)]
    count = 0
    while left:
        (keys, value), count = left.pop(), count + 1
        if count > _MOST_VALUES:
            raise error(f"{where} is nested in itself, or holds more than {_MOST_VALUES:,} values.")
        if isinstance(value, dict):
            left += [pair for key, item in value.items() for pair in ((keys, key), ((keys, key), item))]
        elif isinstance(value, (list, tuple, set)):
            left += [(keys, item) for item in value]
        elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise error(f"{_place(where, keys)} holds a whole number of more than 64 bits.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise error(f"{_place(where, keys)} holds a number that is not finite.")
        elif isinstance(value, str) and storable(value) != value:
            wrong = "text that no process or database takes: a NUL character or half a character"
            raise error(f"{_place(where, keys)} holds {wrong}.")
    return data


def _place(where: str, keys: tuple[Any, ...]) -> str:
    """Return the name of a value in a document; ``keys`` are a pair of its parent's ``keys`` and its own key."""
    names: list[str] = []
    while keys:
        keys, name = keys
        names.append(str(name))
    return f"{where}: {'.'.join(reversed(names))}" if names else where


def read_hjson(text: str, *, build: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    """Parse HJSON, as DeepSpeed parses configs with comments; None if the text is not HJSON.

    ``build`` returns an object from its keys and values.
    """
    import hjson

    try:
        return json.loads(hjson.dumpsJSON(hjson.loads(text, object_pairs_hook=build)))
    except (ValueError, OverflowError, RecursionError):
        return None
