"""Lock files that keep two tuners of a machine from taking the same GPU; each holds the number of who locked it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from optuna_dsat.launch.processes import ProcessKey

__all__ = ["LockOwner", "lock", "lock_owner", "lock_path", "unlock"]


_TRIES, _PAUSE_S = 3, 0.005
"""Whoever waits for a GPU holds its lock for a moment, to see whether it is held."""


@dataclass(frozen=True, kw_only=True)
class LockOwner:
    """Another process that holds a lock."""

    pid: int | None
    """None where the file does not tell, as one that its owner may read only."""
    since: float
    """Unix time at which the file was written last."""


def lock_path(folder: Path, device_id: str) -> Path:
    """Return the lock file of a device.

    Args:
        folder: Where lock files lie.
        device_id: What every tuner of the machine calls the device, however it was named to it.
    """
    return folder / f"optuna-dsat-gpu-{device_id.replace('/', '_')}.lock"


def lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock at ``path``, None where another process holds it."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o666)  # the umask must not keep another user's tuner from locking
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(descriptor, f"{os.getpid()}\n")
            return descriptor
        time.sleep(_PAUSE_S)
    os.close(descriptor)
    return None


def unlock(descriptors: Collection[int]) -> None:
    """Give locks back."""
    for descriptor in descriptors:
        _write(descriptor, "")
        os.close(descriptor)


def lock_owner(path: Path) -> LockOwner | None:
    """Return who holds a lock that this process does not hold; None where nobody does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip()
        known = text.isdigit() and ProcessKey.of(int(text)) is not None  # else left by one that ended
        return LockOwner(pid=int(text) if known else None, since=os.fstat(descriptor).st_mtime)
    finally:
        os.close(descriptor)
    return None


def _write(descriptor: int, text: str) -> None:
    """Make ``text`` the content, where this process may write."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
