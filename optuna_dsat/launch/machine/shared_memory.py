"""Files in shared memory: which processes use them, and which a launch has made.

A process that is killed leaves what it made there: torch's ``torch_*``, ``psm_*`` of multiprocessing, NCCL's
``nccl-*``. Hardly anything but a mapping tells whose a file is, so it is looked for while the processes live, and noted
at once: a tuner may be killed as well. What lay there before the launch is another's, whoever maps it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.adapt.journal import SHARED_MEMORY

__all__ = ["MAKERS", "SharedMemoryWatch", "free_shared_bytes", "noted_path", "shared_memory_of"]

_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
"""Pauses between two looks at the processes while there are files of unknown makers: the first, doubled up to the last.
"""

MAKERS = re.compile(
    r"torch_|psm_|pym-|nccl-|deepspeed_|sem\.|__KMP_REGISTERED_LIB_|ucx_shm_posix_|cuda\.shm\.|\d{6}_[a-z_]+$"
)
"""Names by torch, Python's multiprocessing, NCCL, DeepSpeed, OpenMP, UCX, CUDA and MosaicML's loaders. A process that
has mapped a file of another name may not have made it."""
_BY_TORCH = re.compile(r"torch_(?P<pid>\d+)_.*")
"""Name of a file that torch shares; it has the number of the process that made it."""


def free_shared_bytes() -> int | None:
    """Return how many bytes are free in shared memory; None where there is none."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return the files in shared memory that processes have mapped or open."""
    found: set[Path] = set()
    prefix = f"{SHARED_MEMORY}/"
    for pid in pids:
        with contextlib.suppress(OSError):  # another user's, or gone
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            mapped = (line[place:] for line in lines if (place := line.find(prefix)) >= 0)
            found.update(Path(path) for path in mapped if not path.endswith(" (deleted)"))
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith(prefix) and not target.endswith(" (deleted)"):
                        found.add(Path(target))
    return found


def noted_path(value: Any) -> Path | None:
    """Return the path that a line of a launch's notes names; None if another file has that name by now.

    Args:
        value: The line's JSON: a path, or of a file in shared memory path and inode.

    Raises:
        TypeError, KeyError: If it is neither.
        OSError, ValueError: If there is no such file.
    """
    if not isinstance(value, dict):
        return Path(value)
    path = Path(value["path"])
    return path if path.lstat().st_ino == value["inode"] else None


class SharedMemoryWatch:
    """Finds what the processes of a launch make in shared memory, from the moment at which it is made.

    Args:
        find: Returns the numbers of the launch's living processes.
        record: File that notes what is found; None to note nothing.
    """

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
        """Files that the launch made."""
        return frozenset(self._found)

    def check(self, now: float) -> None:
        """Look whose the files are that were not there before; costs next to nothing where there are none."""
        unknown = frozenset(one for one in _files() - self._before if SHARED_MEMORY / one[0] not in self._found)
        if unknown - self._unknown:
            self._pause_s, self._look_at = _PAUSE_S, now
        self._unknown = unknown
        if not unknown or now < self._look_at:
            return
        self._look_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.add(self._find())

    def add(self, pids: Iterable[int]) -> None:
        """Note what of these processes' files was not there before the launch."""
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
                self._note(path, inode)

    def _note(self, path: Path, inode: int) -> None:
        if self._record is not None:
            with contextlib.suppress(OSError), self._record.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"path": str(path), "inode": inode}) + "\n")


def _shares_memory(pid: int) -> bool:
    """Return whether a process sees this process's shared memory, not that of its launch alone."""
    try:
        return Path(f"/proc/{pid}/root{SHARED_MEMORY}").stat().st_dev == SHARED_MEMORY.stat().st_dev
    except OSError:  # gone
        return False


def _files() -> frozenset[tuple[str, int]]:
    """Return name and inode of what lies in shared memory."""
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
