"""The folder of a study's files: known to be the study's, not only named by the database.

A database says where a study's files lie. Whoever reads one that another made would otherwise copy foreign files into
what the dashboard serves, or write a report over one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from optuna_dsat.escape.paths import OutsideError, held_inside
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.runtime.atomic_write import write_text_atomic
from optuna_dsat.store import StoredLaunch

__all__ = ["MARK", "is_folder_of", "mark_folder"]

MARK = "study.json"
"""File that says which study a folder belongs to."""


def mark_folder(folder: Path, study_uuid: str) -> None:
    """Say in a folder which study's it is; one that cannot be written is left to whoever writes there next."""
    text = json.dumps({"study_uuid": study_uuid}) + "\n"
    try:
        if not (folder / MARK).is_file() or (folder / MARK).read_text(encoding="utf-8") != text:
            folder.mkdir(parents=True, exist_ok=True)
            write_text_atomic(folder / MARK, text)
    except (OSError, ValueError):
        return


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
        found = json.loads(held_inside(folder, *names).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, OutsideError):
        return {}
    return found if isinstance(found, dict) else {}
