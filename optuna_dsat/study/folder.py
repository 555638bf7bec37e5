"""The folder of a study's files: known to be the study's, not only named by the database.

A database says where a study's files lie. Whoever reads one that another made would otherwise copy foreign files into
what the dashboard serves, or write a report over one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.escape.paths import OutsideError, held_inside
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.runtime.files import read_regular, set_aside, write_text_atomic
from optuna_dsat.store import StoredLaunch

__all__ = ["BEING_WRITTEN", "MARK", "digests", "held_folder", "is_folder_of", "is_held", "set_others_aside"]

MARK = "study.json"
"""File that says which study a folder belongs to."""
BEING_WRITTEN = "being written"
"""In the place of a file's digest while the study writes it."""
_TRIES, _PAUSE_S = 20, 0.05
"""Looks at a folder that another tuner holds, and the pause between two of them, in seconds."""


@contextmanager
def held_folder(folder: Path, study_uuid: str) -> Iterator[None]:
    """Within the block, a folder says that it is a study's, and tuners of no other study write there.

    Tuners of the same study share it. A folder that cannot be written, or whose file system has no locks, is not held.

    Raises:
        UsageError: If a tuner of another study writes there: launches of both would have the same folders.
    """
    descriptor = _hold(folder, study_uuid)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Return whether a tuner writes to a folder; False where that cannot be seen, as on file systems without locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _hold(folder: Path, study_uuid: str) -> int | None:
    """Mark a folder and lock it with others of the same study; return the descriptor, None if that cannot be."""
    text = json.dumps({"study_uuid": study_uuid}) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(_TRIES):
            if _is_marked(folder, text):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if _is_marked(folder, text):
                    return descriptor
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_text_atomic(folder / MARK, text)
                continue
            time.sleep(_PAUSE_S)  # the other one may be about to say that it is the same study
    except (OSError, ValueError):
        os.close(descriptor)
        return None
    os.close(descriptor)
    raise UsageError(
        f"Another study writes to {folder} now, and launches of both would have the same folders: choose another "
        "--study or another --output-dir."
    )


def _is_marked(folder: Path, text: str) -> bool:
    with suppress(OSError):
        return read_regular(folder / MARK) == text.encode()
    return False


def set_others_aside(paths: Sequence[Path], written: Mapping[str, str]) -> list[Path]:
    """Rename files that are about to be written and that the study did not write, or somebody changed since.

    Args:
        paths: The files.
        written: ``digests`` of the files as the study last wrote them; ``BEING_WRITTEN`` for one whose writer was
            killed, which is the study's whatever it holds.

    Returns:
        The new paths of the renamed files.

    Raises:
        OSError: If a file cannot be renamed.
    """
    present = [path for path in paths if os.path.lexists(path)]
    return [
        set_aside(path)
        for path in present
        if written.get(path.name) not in (BEING_WRITTEN, digests([path]).get(path.name, ""))
    ]


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 digest of each regular file, by name; files that cannot be read are left out."""
    found = {}
    for path in paths:
        with suppress(OSError):
            found[path.name] = hashlib.sha256(read_regular(path)).hexdigest()
    return found


def is_folder_of(folder: Path, study_uuid: str, launches: Sequence[StoredLaunch]) -> bool:
    """Return whether a folder is a study's, by its mark, or by reports in it of launches that the database has.

    Args:
        folder: The folder that the study's spec names.
        study_uuid: The study.
        launches: Its launches: earlier versions left no mark.
    """
    marked = _read(folder, MARK)
    if "study_uuid" in marked:
        return bool(marked["study_uuid"] == study_uuid)
    reports = ((row.report, _read(folder, row.report.launch_id, RunDirectory(folder).report.name)) for row in launches)
    return any(found.get("started_at") == report.started_at for report, found in reports)


def _read(folder: Path, *names: str) -> dict[str, object]:
    """Return the JSON object in a file of a folder; empty if there is none."""
    try:
        found = json.loads(read_regular(held_inside(folder, *names)))
    except (OSError, ValueError, RecursionError, OutsideError):
        return {}
    return found if isinstance(found, dict) else {}
