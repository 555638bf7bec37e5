"""Read user files, also from a pipe, and check that their values can be stored and passed on."""

from __future__ import annotations

import errno
import json
import math
import os
import select
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.files import storable

__all__ = ["as_written", "checked", "is_pipe", "read_document", "read_hjson"]

_LARGEST_INTEGER = 2**63 - 1
_MOST_SHOWN = 120
"""Characters of a value in a message."""
_PIPE_S = 3.0
"""Longest wait for a pipe's writer to start or continue, in seconds."""


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
        UsageError: If it is neither file nor pipe, or is a pipe without a writer.
    """
    text = os.fspath(path)
    if "\x00" in text:
        raise error("A path has no NUL character.")
    descriptor = os.open(text, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", text)
        if stat.S_ISFIFO(status.st_mode):
            return _pipe_content((os.path.realpath(text), status.st_ino), descriptor, text, error)
        if not stat.S_ISREG(status.st_mode) and text != os.devnull:
            raise error(f"{path} is no file: it is a device or a socket.")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read() or b""
    finally:
        os.close(descriptor)


_pipes: dict[tuple[str, int], bytes] = {}
"""Pipe -> its content, read by this process."""


def _pipe_content(key: tuple[str, int], descriptor: int, path: str, error: Callable[[str], UsageError]) -> bytes:
    if key in _pipes:
        return _pipes[key]
    parts: list[bytes] = []
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + _PIPE_S
    while time.monotonic() < deadline:
        if not waiting.poll(100):
            continue
        try:
            part = os.read(descriptor, 2**16)
        except BlockingIOError:
            continue
        if not part and parts:
            _pipes[key] = b"".join(parts)
            return _pipes[key]
        if not part:  # no writer yet, or the pipe was empty
            time.sleep(0.05)
            continue
        parts.append(part)
        deadline = time.monotonic() + _PIPE_S
    raise error(f"{path} is a pipe, and nothing was written to it within {_PIPE_S:.0f} s.")


def checked(data: Any, where: str, error: Callable[[str], UsageError] = UsageError) -> Any:
    """Return the data of a document, which messages call ``where``, if its values can be stored and passed on.

    Raises:
        UsageError: If the nesting is circular or too deep, a number is too large, or text cannot be a command-line
            argument.
    """
    try:
        _check(data, where, error)
    except RecursionError:
        raise error(f"{where} is nested in itself, or too deeply.") from None
    return data


def _check(value: Any, where: str, error: Callable[[str], UsageError]) -> None:
    if isinstance(value, dict):
        _check([*value, *value.values()], where, error)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _check(item, where, error)
    elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise error(f"{where} holds a whole number of more than 64 bits.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise error(f"{where} holds a number that is not finite.")
    elif isinstance(value, str) and storable(value) != value:
        raise error(f"{where} holds text that no process or database takes: a NUL character or half a character.")


def read_hjson(text: str) -> Any:
    """Parse HJSON, as DeepSpeed parses configs with comments; None if the text is not HJSON."""
    import hjson

    try:
        return json.loads(hjson.dumpsJSON(hjson.loads(text)))
    except (ValueError, OverflowError, RecursionError):
        return None
