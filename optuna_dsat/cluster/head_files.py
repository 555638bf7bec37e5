"""Files of one launch at the head, written as its nodes send them (``cluster/node_files.py``)."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from optuna_dsat.launch.run_directory import RunDirectory

__all__ = ["append_events", "append_log", "write_tracker"]


def append_events(directory: RunDirectory, message: Mapping[str, Any], *, ahead_s: float) -> None:
    """Append a rank's lines to its event file, their times moved to the head's clock."""
    lines = [str(line) for line in message["lines"]]
    if ahead_s:
        lines = [_moved(line, by_s=-ahead_s) for line in lines]
    with directory.events(int(message["rank"])).open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def _moved(line: str, *, by_s: float) -> str:
    with suppress(ValueError, TypeError, KeyError):
        record = json.loads(line)
        record["time"] = record["time"] + by_s
        return json.dumps(record)
    return line


def append_log(directory: RunDirectory, message: Mapping[str, Any]) -> None:
    """Append to one of the logs."""
    with (directory.log_dir / Path(message["file"]).name).open("a", encoding="utf-8") as file:
        file.write(message["text"])


def write_tracker(directory: RunDirectory, message: Mapping[str, Any]) -> None:
    """Write a piece of a file of a node's trackers; one with a path out of their folder is left alone."""
    name = PurePosixPath(str(message["file"]))
    if name.is_absolute() or ".." in name.parts:
        return
    path = directory.trackers_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab" if message["begin"] else "wb") as file:
        file.write(base64.b64decode(message["data"]))
