"""Find which processes use files in shared memory, and which files a launch has created.

A killed process leaves its files there: torch's ``torch_*``, ``psm_*`` of multiprocessing, NCCL's ``nccl-*``. Usually
only a mapping shows which process owns a file, so owners are looked up while the processes live and recorded at once,
because the tuner may be killed as well. Files that existed before the launch are never attributed to it, even if it
maps them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.adapt.journal import SHARED_MEMORY, note

_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
"""Intervals between checks of the processes while files of unknown creators exist: first, doubled up to the last."""

MAKERS = re.compile(
    r"torch_|psm_|pym-|nccl-|deepspeed_|sem\.|__KMP_REGISTERED_LIB_|ucx_shm_posix_|cuda\.shm\.|\d{6}_[a-z_]+$"
)
"""Names used by torch, Python's multiprocessing, NCCL, DeepSpeed, OpenMP, UCX, CUDA and MosaicML's loaders. A process
that has mapped a file of another name may not have created it."""
_BY_TORCH = re.compile(r"torch_(?P<pid>\d+)_.*")
"""Name of a file shared by torch; contains the PID of the process that created it."""


def free_shared_bytes() -> int | None:
    """Return how many bytes are free in shared memory; None if it does not exist."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return the files in shared memory that processes have mapped or open."""
    paths: set[Path] = set()
    prefix = f"{SHARED_MEMORY}/"
    for pid in pids:
        with contextlib.suppress(OSError):  # another user's process, or gone
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            mapped = (line[place:] for line in lines if (place := line.find(prefix)) >= 0)
            paths.update(Path(path) for path in mapped if not path.endswith(" (deleted)"))
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith(prefix) and not target.endswith(" (deleted)"):
                        paths.add(Path(target))
    return paths


def noted_path(value: Any) -> Path | None:
    """Return the path in a journal line (its JSON); None if another file has that name by now.

    Raises:
        TypeError, KeyError: If it is neither a path nor the path and inode of a file in shared memory.
        OSError, ValueError: If there is no such file.
    """
    if not isinstance(value, dict):
        return Path(value)
    path = Path(value["path"])
    return path if path.lstat().st_ino == value["inode"] else None


class SharedMemoryWatch:
    """Finds files created by the processes of a launch in shared memory, from their creation on."""

    def __init__(self, find: Callable[[], Iterable[int]], *, record: Path | None = None) -> None:
        self._find = find
        self._record = record
        self._before = _files()
        self._found: set[Path] = set()
        self._unknown: frozenset[tuple[str, int]] = frozenset()
        self._pause_s = _PAUSE_S
        self._look_at = 0.0

    @property
    def found(self) -> frozenset[Path]:
        """Files created by the launch."""
        return frozenset(self._found)

    def check(self, now: float) -> None:
        """Look for the owners of new files; costs next to nothing without new files."""
        unknown = frozenset(file for file in _files() - self._before if SHARED_MEMORY / file[0] not in self._found)
        if unknown - self._unknown:
            self._pause_s, self._look_at = _PAUSE_S, now
        self._unknown = unknown
        if not unknown or now < self._look_at:
            return
        self._look_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.add(self._find())

    def add(self, pids: Iterable[int]) -> None:
        """Record the files of these processes that did not exist before the launch."""
        numbers = {pid for pid in pids if _shares_memory(pid)}
        used = {path.name for path in shared_memory_of(numbers) if path.parent == SHARED_MEMORY}
        names = {name for name, _ in self._before}
        for name, inode in _files():
            if name in names:
                continue
            by_torch = _BY_TORCH.fullmatch(name)
            made = (name in used and MAKERS.match(name)) or (by_torch is not None and int(by_torch["pid"]) in numbers)
            path = SHARED_MEMORY / name
            if made and path not in self._found and _is_own(path):
                self._found.add(path)
                if self._record is not None:
                    note(self._record, {"path": str(path), "inode": inode})


def _shares_memory(pid: int) -> bool:
    """Return whether a process sees this process's shared memory, not a private mount of its launch."""
    try:
        return Path(f"/proc/{pid}/root{SHARED_MEMORY}").stat().st_dev == SHARED_MEMORY.stat().st_dev
    except OSError:  # gone
        return False


def _files() -> frozenset[tuple[str, int]]:
    """Return names and inodes of all files in shared memory."""
    try:
        with os.scandir(SHARED_MEMORY) as entries:
            return frozenset((entry.name, entry.inode()) for entry in entries)
    except OSError:
        return frozenset()


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False
