"""Remove leftovers of launches, however they ended: processes, shared memory, folders, files and build locks.

While its tuner lives, a finished launch is cleaned up at once (``remove_noted``). Leftovers of a killed tuner are
removed when the next launching command starts, and by tuners that run at the same time (``remove_leftovers``).
Processes are found by their marks (``launch/machine/processes.py``). Unmarked processes and all other leftovers are
found by the tuner's clean-up journal (this module).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.host import own_folder
from optuna_dsat.launch.machine.operators import remove_stale_locks
from optuna_dsat.launch.machine.processes import LaunchProcess, find_leftovers, kill_leftovers
from optuna_dsat.launch.machine.shared_memory import MAKERS, noted_path, shared_memory_of
from optuna_dsat.launch.machine.tree import end_noted
from optuna_dsat.runtime.adapt.journal import SHARED_MEMORY
from optuna_dsat.runtime.files import remove_unlocked, try_lock
from optuna_dsat.runtime.process_identity import process_space

# Clean-up journal of a tuner: lists possible leftovers of its launches, in a folder of the user, until removed.
#
# launches/NAME.lock     locked by the tuner while it lives, however it ends; visible from every namespace
# launches/NAME/tuner    JSON: process number and its PID namespace, folder of its run directories
# launches/NAME/3.jsonl  possible leftovers of a launch: JSON lines, paths of its ranks (``runtime/adapt/journal.py``),
#                        files in shared memory (``launch/machine/shared_memory.py``) and processes
#                        (``launch/machine/tree.py``)

_FOLDER = "launches"
_LOCK = ".lock"
_TUNER = "tuner"
_OTHERS_S = 86400.0
"""Age from which journals of another container are removed here, because that container is assumed to be gone."""


class TunerNotes:
    """Clean-up journal of this process; created for the first launch."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._own: Path | None = None
        self._descriptor: int | None = None  # never closed by garbage collection: launches may outlive this object
        self._count = 0

    def begin(self) -> Path:
        """Return the file that will list the leftovers of the next launch."""
        if self._own is None:
            self._own, self._descriptor = _claim()
            tuner = {"pid": os.getpid(), "space": process_space(), "output_dir": str(self._output_dir.resolve())}
            (self._own / _TUNER).write_text(json.dumps(tuner), encoding="utf-8")
        self._count += 1
        record = self._own / f"{self._count}.jsonl"
        record.touch()
        return record

    def close(self) -> None:
        """Remove the journal, with leftovers of launches that never started, which it still lists."""
        if self._own is not None and self._descriptor is not None:
            for record in self._own.glob("*.jsonl"):
                remove_noted(record)
            _remove(self._own)
            os.close(self._descriptor)
            _leave_no_empty_folder(self._own.parent)
        self._own = self._descriptor = None


@dataclass(frozen=True, kw_only=True)
class GoneTuner:
    """Journal of a tuner that has ended."""

    pid: int | None
    """Its process number; None if not recorded or from another PID namespace."""
    output_dir: Path | None
    """Folder of its run directories; None if not recorded."""
    records: tuple[Path, ...]
    """Journal files of its launches."""


def any_gone() -> bool:
    """Return whether there are journals of tuners that have ended; cheap."""
    with _gone() as result:
        return bool(result)


@contextlib.contextmanager
def gone_tuners() -> Iterator[tuple[GoneTuner, ...]]:
    """Yield the locked journals of tuners that have ended; remove them at the end.

    Raises:
        UsageError: If the user's folder cannot be used.
    """
    with _gone() as result:
        yield tuple(result.values())
        for path in result:
            _remove(path)
            _leave_no_empty_folder(path.parent)


@contextlib.contextmanager
def _gone() -> Iterator[dict[Path, GoneTuner]]:
    """Yield the journals of tuners that have ended by folder, locked against other processes."""
    paths = sorted(own_folder(_FOLDER).glob(f"*{_LOCK}"))
    held = [(path, lock) for path in paths if (lock := try_lock(path)) is not None]
    try:
        owns = (path.with_suffix("") for path, _ in held)
        yield {place: tuner for place in owns if (tuner := _read(place)) is not None}
    finally:
        for _, lock in held:
            os.close(lock)


def _leave_no_empty_folder(parent: Path) -> None:
    with contextlib.suppress(OSError):  # it has journals of other tuners
        parent.rmdir()


def _claim() -> tuple[Path, int]:
    """Create a journal folder; return it and the descriptor of its lock, which is held."""
    while True:
        path = own_folder(_FOLDER) / f"{uuid.uuid4().hex}{_LOCK}"
        try:
            path.touch(mode=0o600, exist_ok=False)
        except FileNotFoundError:  # another tuner has just removed the empty folder
            continue
        descriptor = try_lock(path)
        if descriptor is not None:  # else another process assumed that its tuner had ended
            path.with_suffix("").mkdir(mode=0o700)
            return path.with_suffix(""), descriptor


def _read(folder: Path) -> GoneTuner | None:
    """Return a journal; None if it is left to another container on this machine, which has separate shared memory."""
    pid = output_dir = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        tuner = json.loads((folder / _TUNER).read_text(encoding="utf-8"))
        space, here = tuner["space"], process_space()
        age_s = time.time() - folder.stat().st_mtime
        if space != here and space.partition(":")[0] == here.partition(":")[0] and age_s < _OTHERS_S:
            return None
        pid = int(tuner["pid"]) if space == here else None
        output_dir = Path(tuner["output_dir"])
    return GoneTuner(pid=pid, output_dir=output_dir, records=tuple(sorted(folder.glob("*.jsonl"))))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the next start tries again
        folder.with_name(f"{folder.name}{_LOCK}").unlink(missing_ok=True)


_WATCH_S = 5.0
"""Interval between checks for other tuners that were killed."""

_CLOCK_S = 1.0
"""Tolerance between process start times, counted in ticks since boot, and file times."""

_PARTIAL = re.compile(r"\..+\.(?P<pid>\d+)")
"""Name of a partially written file (``runtime/files.py``)."""

_WORDS = {
    "processes": ("process", "processes"),
    "shared_memory": ("file in shared memory", "files in shared memory"),
    "folders": ("temporary folder", "temporary folders"),
    "files": ("temporary file", "temporary files"),
    "partial_files": ("partly written file", "partly written files"),
    "build_locks": ("lock of a build", "locks of builds"),
}


def removed_in_words(removed: Counter[str]) -> str:
    """Return a summary for the user of the number of removed items by kind; empty if nothing was removed."""
    names = [f"{removed[name]} {words[removed[name] > 1]}" for name, words in _WORDS.items() if removed[name]]
    return f"Removed what a killed run had left: {', '.join(names)}." if names else ""


class LeftoverWatch:
    """Removes leftovers of killed tuners: when a launching command starts, while it runs, and when it ends."""

    def __init__(self, environ: Mapping[str, str], *, on_notice: Callable[[str], None]) -> None:
        self._environ = environ
        self._notify = on_notice
        self._looked = time.monotonic()

    def begin(self) -> None:
        """Remove all leftovers."""
        if removed := remove_leftovers(self._environ):
            self._notify(removed_in_words(removed))

    def check(self) -> None:
        """Remove leftovers of tuners killed since the last check, at most every few seconds."""
        if time.monotonic() - self._looked > _WATCH_S:
            self.look()
            self._looked = time.monotonic()

    def look(self) -> None:
        """Remove leftovers of killed tuners; skip leftovers that cannot be removed now."""
        with contextlib.suppress(UsageError, TimeoutError, OSError):  # reported when the next command starts
            if any_gone():
                self.begin()


def remove_leftovers(environ: Mapping[str, str]) -> Counter[str]:
    """Remove leftovers of this user's ended tuners, and build locks that nobody holds; return their number by kind.

    Raises:
        UsageError: If the user's folder cannot be used.
        TimeoutError: If processes outlive SIGKILL, which only an uninterruptible wait in the kernel explains.
    """
    seen = _made_by(find_leftovers())
    removed = Counter(processes=len(kill_leftovers()))
    removed["shared_memory"] = _remove_shared_memory(seen)
    with gone_tuners() as tuners:
        for tuner in tuners:
            for record in tuner.records:
                removed += remove_noted(record)
            removed["partial_files"] += _remove_partial_files(tuner)
    removed["build_locks"] = len(remove_stale_locks(environ))
    return +removed


def remove_noted(record: Path, *, seen: Collection[Path] = ()) -> Counter[str]:
    """Remove the leftovers that a journal without processes lists, the ``seen`` shared memory, and the journal."""
    try:
        lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    values: list[Any] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):  # truncated line
            values.append(json.loads(line))
    processes, noted = end_noted(values), {*seen}
    for value in values:
        with contextlib.suppress(ValueError, TypeError, KeyError, OSError):  # not a path, or gone
            if (path := noted_path(value)) is not None:
                noted.add(path)
    there = {path for path in noted if _is_there(path)}
    folders = {path for path in there if path.is_dir()}
    shared = {path for path in there - folders if path.parent == SHARED_MEMORY}
    for folder in folders:
        _remove_folder(folder)
    for value in reversed(values):
        _remove_if_empty(value)
    record.unlink(missing_ok=True)
    return +Counter(
        processes=processes,
        shared_memory=_remove_shared_memory(shared),
        folders=len(folders),
        files=sum(map(_remove_file, values)),
    )


def _remove_folder(folder: Path) -> None:
    """Remove a folder, including subfolders whose permissions a script or an overlay has restricted."""
    with contextlib.suppress(OSError):
        folder.chmod(0o700)
    for root, names, _ in os.walk(folder):
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(OSError):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_file(value: Any) -> bool:
    """Remove the temporary file named by a journal line, if any; return whether it existed."""
    path = value.get("file") if isinstance(value, dict) else None
    if not isinstance(path, str) or not Path(path).is_absolute():
        return False
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISREG(Path(path).lstat().st_mode):
            Path(path).unlink()
            return True
    return False


def _remove_if_empty(value: Any) -> None:
    """Remove the folder, made for the folder of a launch, that a journal line names, if any; others may use it."""
    path = value.get("folder_if_empty") if isinstance(value, dict) else None
    if isinstance(path, str):
        with contextlib.suppress(OSError, ValueError):
            Path(path).rmdir()


def _made_by(processes: Collection[LaunchProcess]) -> set[Path]:
    """Return the files in shared memory made by processes of launches, judged by name and modification time."""
    paths: set[Path] = set()
    for mark in {process.mark for process in processes}:
        pids = [process.key.pid for process in processes if process.mark == mark]
        began: list[float] = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                began.append(psutil.Process(pid).create_time())
        for path in shared_memory_of(pids) if began else ():
            with contextlib.suppress(OSError):
                if (
                    path.parent == SHARED_MEMORY
                    and MAKERS.match(path.name)
                    and path.stat().st_mtime >= min(began) - _CLOCK_S
                ):
                    paths.add(path)
    return paths


def _remove_shared_memory(paths: Collection[Path]) -> int:
    """Remove files in shared memory that no process uses; return their number."""
    there = {path for path in paths if _is_there(path)}
    if there:
        there -= shared_memory_of(psutil.pids())  # a new launch may reuse the file names of an old launch
    removed = 0
    for path in there:
        with contextlib.suppress(OSError):  # another user's by now, or gone
            path.unlink()
            removed += 1
    return removed


def _is_there(path: Path) -> bool:
    try:
        return path.is_absolute() and not path.is_symlink() and path.exists()
    except (OSError, ValueError):  # not a valid path
        return False


def _remove_partial_files(tuner: GoneTuner) -> int:
    """Remove partially written files in the folders of a killed tuner's study and launches; return their number."""
    if tuner.pid is None or tuner.output_dir is None:
        return 0
    paths = [*tuner.output_dir.glob(".*"), *tuner.output_dir.glob("*/.*")]
    partial = [path for path in paths if (m := _PARTIAL.fullmatch(path.name)) and int(m["pid"]) == tuner.pid]
    removed = 0
    for path in partial:
        with contextlib.suppress(OSError):  # a link, or a process of this number on another machine writes it
            remove_unlocked(path)
            removed += 1
    return removed
