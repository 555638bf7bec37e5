"""Clean-up journal of a rank: files that it may leave outside its run directory, for removal after its end.

A rank that is killed, or a launch that ends before its first step, removes nothing itself.
"""

from __future__ import annotations

import contextlib
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

from optuna_dsat.runtime.files import file_system
from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.process_identity import process_space, read_command, start_ticks

SHARED_MEMORY = Path("/dev/shm")


def note(record: Path, what: str | Mapping[str, object]) -> None:
    """Append a path, or a JSON object, to the journal as one line."""
    with contextlib.suppress(OSError), record.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(what) + "\n")


def note_shared_buffer(record: Path, environ: Mapping[str, str], *, rank: int) -> None:
    """Record the shared-memory buffer that DeepSpeed's CPU communication operator creates and never unlinks.

    The name is the one in ``csrc/cpu/comm/shm.cpp`` of DeepSpeed 0.19.8. It is recorded even if no buffer is created.
    """
    store = f"{environ.get('MASTER_ADDR', '')}_{environ.get('MASTER_PORT', '')}"
    note(record, str(SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_{store}_{rank}"))


def note_created_files(record: Path) -> None:
    """Record files in the temporary folder and in shared memory before this process and its forks create them.

    A rank that is killed, or exits early after its last step, does not remove its temporary files. They may exist only
    briefly, so they cannot be found by looking. Covers ``tempfile``, and files that Python creates in shared memory;
    files of C libraries are detected while a process uses them (``launch/machine/shared_memory.py``).
    """

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event in ("tempfile.mkstemp", "tempfile.mkdtemp"):
            path = os.fsdecode(args[0])
            if os.path.dirname(path) == tempfile.tempdir and not os.path.lexists(path):  # noqa: PTH120 - opens no module
                note(record, {"file": path} if event == "tempfile.mkstemp" else path)
        elif event == "open" and isinstance(args[0], (str, bytes)) and (args[2] or 0) & os.O_CREAT:
            _note_new(record, os.fsdecode(args[0]))

    sys.addaudithook(look)

    @patch(importlib.import_module("_posixshmem"), "shm_open", copies=True)
    def shm_open(original: Any, path: Any, flags: int, *rest: Any, **named: Any) -> Any:
        if flags & os.O_CREAT:
            _note_new(record, str(SHARED_MEMORY / str(path).lstrip("/")))
        return original(path, flags, *rest, **named)


def share_multiprocessing_folder() -> None:
    """Create the temporary folder of ``multiprocessing``, which spawned processes, without this journal, then share.

    Call it before writes are redirected: C code binds sockets in it.
    """
    with contextlib.suppress(OSError):  # raised again where the folder is needed
        importlib.import_module("multiprocessing.util").get_temp_dir()


def _note_new(record: Path, path: str) -> None:
    """Record a path in shared memory that does not exist yet."""
    with contextlib.suppress(OSError, ValueError):  # the working directory is gone, or the path is invalid
        whole = os.path.abspath(path)  # noqa: PTH100 - in a hook, which opens no module
        if os.path.dirname(whole) == str(SHARED_MEMORY) and not os.path.lexists(whole):  # noqa: PTH120
            note(record, whole)


# Locks of torch's extension builds: detecting their owners, and removing stale locks.
#
# DeepSpeed compiles its operators on first use. torch guards a build with a lock *file*, whose existence is the lock
# (``torch.utils.file_baton``), and waits for its removal without limit: after a killed build, every process would wait
# forever. A running build keeps the file open, and its compilers work in the folder, so a living owner can be detected
# on the same machine and in the same container. For other machines and containers, locks made by this package contain
# their owner.

_ABANDONED_S = 600.0
"""Age in seconds from which a lock is stale if its owner may be on another machine or in another container."""
_POLL_S, _LOOK_S = 0.1, 1.0
"""Intervals in seconds, while waiting for a lock, of checking its existence and its owner."""

_TOOLS = re.compile(
    r"(.*-)?(ninja|c\+\+|g\+\+|gcc|cc|cc1|cc1plus|clang|clang\+\+|icpx|nvcc|cicc|cudafe\+\+|ptxas|fatbinary|hipcc"
    r"|as|ld|collect2)(-[\d.]+)?"
)
"""Names of build programs."""

_SHARED = re.compile(
    r"nfs\d?|cifs|smb\w*|lustre|gpfs|beegfs|ceph|glusterfs|afs|panfs|wekafs|fuse\.(sshfs|ceph|gluster.*)"
)
"""Types of file systems that other machines may also mount (field 9 of ``/proc/self/mountinfo``: proc(5))."""


def remove_if_abandoned(lock: Path) -> bool:
    """Remove a lock without an owner; return whether it was removed."""
    try:
        before = lock.stat()
        if is_held(lock):
            return False
        now = lock.stat()
        if (before.st_ino, before.st_ctime_ns) != (now.st_ino, now.st_ctime_ns):
            return False  # another process has just removed it, and builds
        lock.unlink()
    except OSError:
        return False
    return True


def is_held(lock: Path) -> bool:
    """Return whether a lock has a living owner; an owner that cannot be checked counts while the lock is young."""
    processes = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    if any(_works_at(pid, lock) for pid in processes):
        return True
    try:
        signer = lock.read_text(encoding="utf-8", errors="replace").split()
        made = lock.stat()
    except OSError:
        return False
    if signer:
        node, space, pid, start = (*signer, *("",) * 4)[:4]
        if (node, space) == (platform.node(), process_space()):
            return pid.isdigit() and str(start_ticks(int(pid))) == start
        seen = False
    else:
        seen = _SHARED.fullmatch(file_system(lock.parent)) is None and (made.st_uid == os.getuid() or os.getuid() == 0)
    return not seen and time.time() - made.st_mtime <= _ABANDONED_S


def guard_builds(file_baton: Any) -> None:
    """Write the owner into torch's build locks; take over stale locks, and their builds, instead of waiting."""
    baton_class = file_baton.FileBaton
    if hasattr(baton_class.try_acquire, "__wrapped__"):
        return

    def acquire(original: Any, baton: Any) -> bool:
        path = Path(baton.lock_file_path)
        taken = bool(original(baton)) or (remove_if_abandoned(path) and bool(original(baton)))
        if taken:
            with contextlib.suppress(OSError):  # a full disk: the owner is then found by its open file
                maker = (platform.node(), process_space(), os.getpid(), start_ticks(os.getpid()))
                path.write_text(" ".join(map(str, maker)) + "\n", encoding="utf-8")
        return taken

    def wait(_original: Any, baton: Any) -> None:
        path, looked = Path(baton.lock_file_path), 0.0

        def is_unfinished() -> bool:  # the builder was killed, and its lock removed
            return (path.parent / "build.ninja").exists() and not any(path.parent.glob("*.so"))

        while path.exists() or is_unfinished():
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                if not is_held(path) and baton.try_acquire():
                    if (path.parent / "build.ninja").exists():
                        with contextlib.suppress(OSError):  # errors show when the result is loaded
                            subprocess.run(["ninja"], cwd=path.parent, stdout=subprocess.DEVNULL, check=False)
                    baton.release()
                    return
            time.sleep(_POLL_S)

    patch(baton_class, "try_acquire")(acquire)
    patch(baton_class, "wait")(wait)


def _works_at(pid: int, lock: Path) -> bool:
    """Return whether a process has a lock open, or is a build program working in its folder."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if descriptor.readlink().name == lock.name and descriptor.samefile(lock):
                    return True
    words = read_command(pid)
    if not any(_TOOLS.fullmatch(Path(word).name) for word in words[:2]):
        return False
    folder = str(lock.parent.resolve())
    with contextlib.suppress(OSError):
        if str(Path(f"/proc/{pid}/cwd").readlink()) == folder:
            return True
    return any(folder in word for word in words)
