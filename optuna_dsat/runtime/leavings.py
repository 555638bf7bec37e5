"""Notes of a rank on what it may leave outside its run directory: whoever outlives it removes that.

A rank that is killed removes nothing itself, and a launch that ends before its first step has not come to it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.replacing import replace_function

__all__ = [
    "SHARED_MEMORY",
    "note",
    "note_shared_buffer",
    "note_shared_memory",
    "note_temporary_files",
    "note_temporary_folders",
    "share_multiprocessing_folder",
]

SHARED_MEMORY = Path("/dev/shm")


def note(record: Path, what: str | Mapping[str, str]) -> None:
    """Append a path, or another thing, to the notes, one JSON text a line."""
    with contextlib.suppress(OSError), record.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(what) + "\n")


def note_shared_buffer(record: Path, environ: Mapping[str, str], *, rank: int) -> None:
    """Note the buffer that DeepSpeed's operator for the CPU makes in shared memory and never unlinks.

    It has the name that ``csrc/cpu/comm/shm.cpp`` of DeepSpeed 0.19.8 gives it, also where none is made.

    Args:
        record: File that receives the path.
        environ: Environment of the rank.
        rank: Its number.
    """
    store = f"{environ.get('MASTER_ADDR', '')}_{environ.get('MASTER_PORT', '')}"
    note(record, str(SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_{store}_{rank}"))


def note_temporary_folders(record: Path) -> None:
    """Have every folder that ``tempfile.mkdtemp`` makes in the temporary folder noted.

    Trackers leave such folders behind, and a rank that is killed leaves all of its own.

    Args:
        record: File that receives the paths.
    """
    original = tempfile.mkdtemp

    @functools.wraps(original)
    def mkdtemp(suffix: Any = None, prefix: Any = None, dir: Any = None) -> Any:
        made = original(suffix, prefix, dir)
        if dir is None:
            note(record, os.fsdecode(made))
        return made

    replace_function(tempfile, "mkdtemp", mkdtemp)


def note_temporary_files(record: Path) -> None:
    """Have every file that ``tempfile`` makes in the temporary folder noted before it does.

    A rank that is killed, or that leaves after its last step, removes none of those that are open, as it would at its
    normal end.

    Args:
        record: File that receives their paths.
    """

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "tempfile.mkstemp":
            path = os.fsdecode(args[0])
            if os.path.dirname(path) == tempfile.tempdir and not os.path.lexists(path):  # noqa: PTH120 - opens no module
                note(record, {"file": path})

    sys.addaudithook(look)


def share_multiprocessing_folder(util: Any) -> None:
    """Make this process's temporary folder of ``multiprocessing``, which the processes that it spawns then use, too.

    They are fresh interpreters, which note nothing: each would make a folder of its own.

    Args:
        util: ``multiprocessing.util``.
    """
    with contextlib.suppress(OSError):  # whoever needs one says so
        util.get_temp_dir()


def note_shared_memory(record: Path) -> None:
    """Have what this process and its forks make in shared memory noted before they do: it may be in use for an instant.

    That is what Python opens there, and ``multiprocessing.shared_memory``. What a library in C makes, or another
    program, is seen while a process uses it (``launch/shared_memory.py``). What was there before is not noted.

    Args:
        record: File that receives the paths.
    """

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes) and isinstance(args[2], int) and args[2] & os.O_CREAT:
            _note_new(record, os.fsdecode(args[0]))

    sys.addaudithook(look)
    with contextlib.suppress(ImportError):  # a platform without it
        posix = importlib.import_module("_posixshmem")
        original = posix.shm_open

        @functools.wraps(original)
        def shm_open(path: Any, flags: int, *rest: Any, **named: Any) -> Any:
            if flags & os.O_CREAT:
                _note_new(record, str(SHARED_MEMORY / str(path).lstrip("/")))
            return original(path, flags, *rest, **named)

        replace_function(posix, "shm_open", shm_open)


def _note_new(record: Path, path: str) -> None:
    """Note a path in shared memory at which there is nothing yet."""
    with contextlib.suppress(OSError, ValueError):  # a working directory that is gone, a path that no file has
        whole = os.path.abspath(path)  # noqa: PTH100 - in a hook, which opens no module
        if os.path.dirname(whole) == str(SHARED_MEMORY) and not os.path.lexists(whole):  # noqa: PTH120
            note(record, whole)
