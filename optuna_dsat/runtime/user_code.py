"""Places in the user's code, its syntax tree, and the stacks of a rank on request."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import itertools
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from optuna_dsat.runtime.files import read_regular

Place = tuple[str, int]
"""File and line."""

LARGEST_SIZE = 2**20
"""Largest number that may be a batch size, in samples."""
LAUNCH_LINE = re.compile(
    r"^(?!.*(?:\b(?:install|p?grep|p?kill|killall|echo)\b|--(?:help|version)\b)).*?(?:^|[\s/])"
    r"(?:deepspeed|torchrun|accelerate\s+launch|torch\.distributed\.(?:run|launch))\s+(?:-|\S+\.py|$)",
    re.MULTILINE,
)
"""Matches a launcher and the start of its arguments, in a string that a program runs as a command."""
_LIBRARIES = ("site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}")
"""Parts of a path that identify an installed module."""
_MOST_PLACES = 16
"""Maximum number of recorded frames of the user's code per call."""


def is_size(value: Any) -> bool:
    """Return whether a value may be a batch size."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE


def is_stage(value: Any) -> bool:
    """Return whether a value may be a ZeRO stage."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 3


def is_installed(file: str) -> bool:
    """Return whether a source file belongs to an installed package or to the standard library."""
    return any(part in _LIBRARIES for part in Path(file).parts)


def place_of(frame: FrameType | None) -> Place:
    """Return the place in the user's code that leads to a frame; without user code, the place of the frame."""
    innermost = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    return next(_users_places(frame), innermost)


def places_of(frame: FrameType | None) -> list[Place]:
    """Return the places in the user's code that lead to a frame, innermost first."""
    return list(itertools.islice(_users_places(frame), _MOST_PLACES))


def _users_places(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not is_installed(file) and "optuna_dsat" not in Path(file).parts:
            yield file, frame.f_lineno
        frame = frame.f_back


def parsed_source(file: str | Path) -> ast.Module:
    """Return the syntax tree of a Python file.

    Raises:
        OSError: If it cannot be read.
        SyntaxError: If it is not Python, or nested too deeply for this interpreter.
    """
    try:
        return _parsed(read_regular(file))
    except (RecursionError, MemoryError):
        raise SyntaxError("nested too deeply") from None
    except ValueError as error:
        raise SyntaxError(str(error)) from None


@lru_cache(maxsize=200)  # each check at the start of a search reads the script and the files that it imports
def _parsed(source: bytes) -> ast.Module:
    # On a syntax error, the interpreter reads the wrong line again from the file called ``filename``; reading a
    # kernel log a second time would block until its next line. Warnings appear when the script itself runs.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, filename=os.devnull)


def called_name(call: ast.Call) -> str:
    """Return the name of a called function or method; empty for other expressions."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def declares_option(call: ast.Call) -> bool:
    """Return whether a call declares an option of argparse, optparse, click or typer by its name."""
    return called_name(call) in ("add_argument", "add_option", "option", "Option", "Argument")


STACK_SIGNAL = signal.SIGRTMAX - 3
"""Signal that makes a rank append the stacks of its threads to its file."""


def stacks_path(log_dir: Path, rank: int | str) -> Path:
    """Return the file for the stacks of a rank; a pattern of all files for ``*``."""
    return log_dir / f"rank{rank}.stacks.log"


_registered: list[int] = []
"""Descriptor of the file for stacks."""


def register_stacks(log_dir: Path, rank: int) -> None:
    """Append the stacks of all threads to the rank's file, and to no earlier one, at each ``STACK_SIGNAL``."""
    with contextlib.suppress(OSError):
        path = stacks_path(log_dir, rank)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)
        while _registered:
            os.close(_registered.pop())
        _registered.append(descriptor)
