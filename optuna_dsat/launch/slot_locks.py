"""Lock files that keep two tuners of a machine from taking the same GPU; each holds its owner's process number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.processes import ProcessKey

__all__ = ["LockOwner", "lock", "lock_owner", "lock_path", "unlock"]

_TRY_S, _PAUSE_S = 0.012, 0.004
"""Time for an attempt, and pause within it: ``lock_owner`` of another tuner holds the lock for an instant."""


@dataclass(frozen=True, kw_only=True)
class LockOwner:
    """Another holder of a lock."""

    pid: int | None
    """Process number; None if the lock file does not name a living process."""
    since: float
    """Unix time of the last write to the lock file."""


def lock_path(folder: Path, device_id: str) -> Path:
    """Return the lock file of a device.

    Args:
        folder: Folder of the lock files.
        device_id: Name of the device that all tuners of the machine agree on.
    """
    return folder / f"optuna-dsat-gpu-{device_id.replace('/', '_')}.lock"


def lock(path: Path) -> BaseFileLock | None:
    """Return the lock at ``path``, held until it is released or this process ends; None if another holder has it."""
    held = _try_lock(path)
    if held is not None:
        _write(path, f"{os.getpid()}\n")
    return held


def unlock(locks: Collection[BaseFileLock]) -> None:
    """Release locks."""
    for held in locks:
        _write(Path(held.lock_file), "")
        held.release()


def lock_owner(path: Path) -> LockOwner | None:
    """Return who holds the lock at ``path``, None if nobody does."""
    if not path.exists():
        return None
    free = _try_lock(path)
    if free is not None:
        free.release()
        return None
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
        since = path.stat().st_mtime
    except OSError:
        text, since = "", 0.0
    known = text.isdigit() and ProcessKey.of(int(text)) is not None  # else left by a process that has ended
    return LockOwner(pid=int(text) if known else None, since=since)


def _try_lock(path: Path) -> BaseFileLock | None:
    if path.is_symlink():
        raise UsageError(f"{path} is a link, which no lock of a GPU is. Remove it.")
    found = FileLock(path, timeout=_TRY_S, poll_interval=_PAUSE_S, mode=0o600, fallback_to_soft=False)
    try:
        found.acquire()
    except Timeout:
        return None
    except PermissionError:
        if path.exists():
            return None  # its owner alone may write it
        raise
    return found


def _write(path: Path, text: str) -> None:
    """Replace the content of an existing file if this process may write it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
