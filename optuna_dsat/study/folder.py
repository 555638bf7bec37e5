"""The folder of a study's files, verified to belong to the study.

The database contains the path of the folder. Without verification, reading a database of another user could copy
foreign files to the dashboard or overwrite them with a report.
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
from optuna_dsat.runtime.files import read_regular, set_aside, write_text_atomic

MARK = "study.json"
"""File that identifies the study of a folder."""
BEING_WRITTEN = "being written"
"""Placeholder for a file's digest while the study writes it."""
_TRIES, _PAUSE_S = 20, 0.05
"""Attempts to lock a folder that another tuner holds, and the pause between attempts, in seconds."""


@contextmanager
def held_folder(folder: Path, study_uuid: str) -> Iterator[None]:
    """Mark a folder as the study's and lock it against tuners of other studies within the block.

    It is not locked if it is not writable or its file system has no locks.

    Raises:
        UsageError: If a tuner of another study writes there: launches of both would use the same folders.
    """
    descriptor = _hold(folder, study_uuid)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Return whether a tuner writes to a folder; False if unknown, e.g. on file systems without locks."""
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
    """Mark a folder and take the study's shared lock; return the file descriptor, None if impossible."""
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
            time.sleep(_PAUSE_S)  # the other tuner may be about to mark the same study
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
    """Rename files that the study did not write, or that were changed since; return the new paths.

    ``written`` is ``digests`` of the files as last written; ``BEING_WRITTEN`` for a file whose writer was killed, which
    belongs to the study regardless of its content.

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
    result = {}
    for path in paths:
        with suppress(OSError):
            result[path.name] = hashlib.sha256(read_regular(path)).hexdigest()
    return result


def is_folder_of(folder: Path, study_uuid: str) -> bool:
    """Return whether a folder is a study's, by its mark."""
    try:
        marked = json.loads(read_regular(held_inside(folder, MARK)))
    except (OSError, ValueError, RecursionError, OutsideError):
        return False
    return isinstance(marked, dict) and marked.get("study_uuid") == study_uuid
