"""Notes of a rank on what it may leave outside its run directory: whoever outlives it removes that.

A rank that is killed removes nothing itself, and a launch that ends before its first step has not come to it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.imports import replace_function
from optuna_dsat.runtime.process_identity import process_space, start_ticks

__all__ = [
    "SHARED_MEMORY",
    "guard_builds",
    "is_held",
    "note",
    "note_shared_buffer",
    "note_shared_memory",
    "note_temporary_files",
    "note_temporary_folders",
    "remove_if_abandoned",
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
    program, is seen while a process uses it (``launch/machine/shared_memory.py``). What was there before is not noted.

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


# Locks of torch's builds of extensions: who holds one, and what becomes of one that nobody holds.
#
# DeepSpeed compiles its operators on first use. torch guards a build with a lock *file*, whose existence is the lock
# (``torch.utils.file_baton``), and waits for its removal without limit: a builder that is killed would make everybody
# wait for ever. The builder keeps the file open meanwhile, and its compilers work in the folder, so whether it lives
# can be seen, unless it runs on another machine or in another container. Then the lock says so, if one of ours made
# it.

_ABANDONED_S = 600.0
"""Age from which a lock is stale that may be held where its holder cannot be seen from here."""
_POLL_S, _LOOK_S = 0.1, 1.0
"""Pauses of a wait for a lock: until it is looked whether it is there, and whether it is held."""

_PROC = Path("/proc")

_TOOLS = re.compile(
    r"(.*-)?(ninja|c\+\+|g\+\+|gcc|cc|cc1|cc1plus|clang|clang\+\+|icpx|nvcc|cicc|cudafe\+\+|ptxas|fatbinary|hipcc"
    r"|as|ld|collect2)(-[\d.]+)?"
)
"""Names of programs that take part in a build."""

_SHARED = re.compile(
    r"nfs\d?|cifs|smb\w*|lustre|gpfs|beegfs|ceph|glusterfs|afs|panfs|wekafs|fuse\.(sshfs|ceph|gluster.*)"
)
"""File systems that other machines may have mounted, too (field 9 of ``/proc/self/mountinfo``: proc(5))."""


def remove_if_abandoned(lock: Path) -> bool:
    """Remove a lock that nobody holds; return whether it was removed."""
    try:
        before = lock.stat()
        if is_held(lock):
            return False
        now = lock.stat()
        if (before.st_ino, before.st_ctime_ns) != (now.st_ino, now.st_ctime_ns):
            return False  # another process has removed it meanwhile, and builds
        lock.unlink()
    except OSError:
        return False
    return True


def is_held(lock: Path) -> bool:
    """Whether a lock has a living holder: one that can be seen, or one that cannot while the lock is young."""
    if any(_works_at(pid, lock) for pid in _processes()):
        return True
    try:
        signer = lock.read_text(encoding="utf-8", errors="replace").split()
        made = lock.stat()
    except OSError:
        return False
    if signer:
        node, space, pid, start = (*signer, *("",) * 4)[:4]
        if _PROC.is_dir() and (node, space) == (platform.node(), process_space()):
            return pid.isdigit() and str(start_ticks(int(pid))) == start
        seen = False
    else:
        seen = _PROC.is_dir() and not _is_shared(lock.parent) and (made.st_uid == os.getuid() or os.getuid() == 0)
    return not seen and time.time() - made.st_mtime <= _ABANDONED_S


def guard_builds(file_baton: Any) -> None:
    """Have torch's locks say who made them, and have nobody in this process wait for one that is abandoned.

    Who waits for a builder that is killed goes on with its build.

    Args:
        file_baton: The module ``torch.utils.file_baton``; its class is patched in place, once.
    """
    baton_class = file_baton.FileBaton
    if hasattr(baton_class.try_acquire, "__wrapped__"):
        return
    acquire = baton_class.try_acquire

    @functools.wraps(acquire)
    def try_acquire(baton: Any) -> bool:
        path = Path(baton.lock_file_path)
        taken = bool(acquire(baton)) or (remove_if_abandoned(path) and bool(acquire(baton)))
        if taken:
            with contextlib.suppress(OSError):  # a full disk: then it is judged by who has it open
                maker = (platform.node(), process_space(), os.getpid(), start_ticks(os.getpid()))
                path.write_text(" ".join(map(str, maker)) + "\n", encoding="utf-8")
        return taken

    @functools.wraps(baton_class.wait)
    def wait(baton: Any) -> None:
        path, looked = Path(baton.lock_file_path), 0.0
        while path.exists():
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                if not is_held(path) and try_acquire(baton):
                    _finish_build(path.parent)
                    baton.release()
                    return
            time.sleep(_POLL_S)

    baton_class.try_acquire, baton_class.wait = try_acquire, wait


def _finish_build(folder: Path) -> None:
    """Go on with a build whose builder was killed, as it would itself; what fails is seen when its result is loaded."""
    if (folder / "build.ninja").exists():
        with contextlib.suppress(OSError):
            subprocess.run(["ninja"], cwd=folder, stdout=subprocess.DEVNULL, check=False)


def _processes() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()] if _PROC.is_dir() else []


def _works_at(pid: int, lock: Path) -> bool:
    """Whether a process has a lock open, or is a program of a build and at work in its folder."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if descriptor.readlink().name == lock.name and descriptor.samefile(lock):
                    return True
    try:
        words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    except OSError:
        return False
    if not any(_TOOLS.fullmatch(Path(word).name) for word in words[:2]):
        return False
    folder = str(lock.parent.resolve())
    with contextlib.suppress(OSError):
        if str(Path(f"/proc/{pid}/cwd").readlink()) == folder:
            return True
    return any(folder in word for word in words)


def _is_shared(folder: Path) -> bool:
    """Whether a folder lies on a file system that other machines may have mounted, too."""
    best, kind = "", ""
    path = str(folder.resolve())
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            point = left.split()[4].encode().decode("unicode_escape")
            if len(point) >= len(best) and (path == point or path.startswith(f"{point.rstrip('/')}/")):
                best, kind = point, right.split()[0]
    return _SHARED.fullmatch(kind) is not None
