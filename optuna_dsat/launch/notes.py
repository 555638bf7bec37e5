"""Notes of a tuner on what its launches may leave behind, in a folder of the user's own until it is removed.

launches/NAME.lock      locked by the tuner while it lives, whatever ends it, and seen so from every namespace
launches/NAME/tuner     JSON: number of its process, where that counts, folder of its run directories
launches/NAME/3.jsonl   what one launch may leave: JSON lines, paths of its ranks (``runtime/leavings.py``), files in
                        shared memory (``launch/shared_memory.py``) and processes (``launch/orphans.py``)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optuna_dsat.launch.own_folder import own_folder
from optuna_dsat.runtime.process_identity import process_space

__all__ = ["GoneTuner", "TunerNotes", "any_gone", "gone_tuners"]

_FOLDER = "launches"
_LOCK = ".lock"
_TUNER = "tuner"
_OTHERS_S = 86400.0
"""Age from which the notes of another container are removed here: it is taken to be gone."""


class TunerNotes:
    """Notes of this process; written once the first launch needs them.

    Args:
        output_dir: Folder of the run directories.
        folder: Folder of all tuners' notes; None for that of the user.
    """

    def __init__(self, output_dir: Path, *, folder: Path | None = None) -> None:
        self._output_dir = output_dir
        self._parent = folder
        self._own: Path | None = None
        self._descriptor: int | None = None  # never closed by a collection of this object: launches may outlive it
        self._count = 0

    def begin(self) -> Path:
        """Return the file in which the next launch notes what it may leave.

        Raises:
            UsageError: If the user's own folder cannot be used.
        """
        if self._own is None:
            self._own, self._descriptor = _claim(self._parent)
            tuner = {"pid": os.getpid(), "space": process_space(), "output_dir": str(self._output_dir.resolve())}
            (self._own / _TUNER).write_text(json.dumps(tuner), encoding="utf-8")
        self._count += 1
        record = self._own / f"{self._count}.jsonl"
        record.touch()
        return record

    def close(self) -> None:
        """Remove the notes; what they name has been removed."""
        if self._own is not None and self._descriptor is not None:
            _remove(self._own)
            os.close(self._descriptor)
            if self._parent is None:
                _leave_no_empty_folder(self._own.parent)
        self._own = self._descriptor = None


@dataclass(frozen=True, kw_only=True)
class GoneTuner:
    """The notes of a tuner that is gone."""

    pid: int | None
    """Number of its process; None if the notes do not say, or it counts elsewhere."""
    output_dir: Path | None
    """Folder of its run directories; None if the notes do not say."""
    records: tuple[Path, ...]
    """What each of its launches noted."""


def any_gone(folder: Path | None = None) -> bool:
    """Whether there are notes of tuners that are gone; costs next to nothing.

    Args:
        folder: As for ``gone_tuners``.
    """
    with _gone(folder) as found:
        return bool(found)


@contextlib.contextmanager
def gone_tuners(folder: Path | None = None) -> Iterator[tuple[GoneTuner, ...]]:
    """Yield the notes of tuners that are gone, which no other process looks at meanwhile; they are removed at the end.

    Args:
        folder: Folder of all tuners' notes; None for that of the user.

    Raises:
        UsageError: If the user's own folder cannot be used.
    """
    with _gone(folder) as found:
        yield tuple(found.values())
        for own in found:
            _remove(own)
        if folder is None and found:
            _leave_no_empty_folder(own_folder(_FOLDER))


@contextlib.contextmanager
def _gone(folder: Path | None) -> Iterator[dict[Path, GoneTuner]]:
    """Yield the notes of tuners that are gone, by their folders, and keep other processes from them."""
    parent = own_folder(_FOLDER) if folder is None else folder
    held = [(path, lock) for path in sorted(parent.glob(f"*{_LOCK}")) if (lock := _try_lock(path)) is not None]
    try:
        owns = (path.with_suffix("") for path, _ in held)
        yield {own: tuner for own in owns if (tuner := _read(own)) is not None}
    finally:
        for _, lock in held:
            os.close(lock)


def _leave_no_empty_folder(parent: Path) -> None:
    with contextlib.suppress(OSError):  # there are notes of others
        parent.rmdir()


def _claim(parent: Path | None) -> tuple[Path, int]:
    """Return a new folder for notes and the descriptor of its lock, which is held."""
    while True:
        path = (own_folder(_FOLDER) if parent is None else parent) / f"{uuid.uuid4().hex}{_LOCK}"
        try:
            path.touch(mode=0o600, exist_ok=False)
        except FileNotFoundError:  # another tuner has just removed the empty folder
            continue
        descriptor = _try_lock(path)
        if descriptor is not None:  # else somebody took it for one of a tuner that is gone
            path.with_suffix("").mkdir(mode=0o700)
            return path.with_suffix(""), descriptor


def _try_lock(path: Path) -> int | None:
    """Lock a file; return its descriptor, None if another process holds it or has removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _read(own: Path) -> GoneTuner | None:
    """Return notes; None for those that are left to another container of this machine: its shared memory is its own."""
    pid = output_dir = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        tuner = json.loads((own / _TUNER).read_text(encoding="utf-8"))
        space, here = tuner["space"], process_space()
        if space != here and space.partition(":")[0] == here.partition(":")[0] and _age_s(own) < _OTHERS_S:
            return None
        pid = int(tuner["pid"]) if space == here else None
        output_dir = Path(tuner["output_dir"])
    return GoneTuner(pid=pid, output_dir=output_dir, records=tuple(sorted(own.glob("*.jsonl"))))


def _age_s(own: Path) -> float:
    return time.time() - own.stat().st_mtime


def _remove(own: Path) -> None:
    shutil.rmtree(own, ignore_errors=True)
    with contextlib.suppress(OSError):  # the next start tries again
        own.with_name(f"{own.name}{_LOCK}").unlink(missing_ok=True)
