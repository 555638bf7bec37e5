"""Links from a page to files of a study's launches: existing configs and logs inside the study's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from optuna_dsat.escape.paths import OutsideError, held_inside
from optuna_dsat.launch.protocol import is_launch_id
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.report.view import StudyView

LIVE_FILES = "files"
"""First part of the path under which the live page serves the files of launches."""

_LOG = re.compile(r"(rank\d{1,5}\.(stdout|stderr)|agent)\.log")
_CONFIG = RunDirectory(Path()).config.name
_MOST_LAUNCHES = 12
"""Maximum number of launches per trial whose files are linked."""


@dataclass(frozen=True, kw_only=True)
class FileLink:
    """A link to a file of a launch."""

    label: str
    launch_id: str
    """The file's launch."""
    href: str
    """URL-escaped, but not HTML-escaped."""


def file_of(folder: Path, launch_id: str, name: str) -> Path | None:
    """Return a launch's config or log by its file's name; None for other names, links out of the folder, no file."""
    is_log = _LOG.fullmatch(name) is not None
    if not is_launch_id(launch_id) or not (is_log or name == _CONFIG):
        return None
    directory = RunDirectory(Path(launch_id))
    relative = directory.log_dir / name if is_log else directory.config
    try:
        path = held_inside(folder, *relative.parts)
        return path if path.is_file() and path.stat().st_size > 0 else None
    except (OSError, OutsideError):
        return None


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links from a page to the files of a study's launches."""

    view: StudyView
    page: Path | None
    """Folder of the page; None for the live page, which serves the files itself."""

    def of(self, launch_ids: Sequence[str]) -> Iterator[FileLink]:
        """Yield links to the config of the first launch, and to a log of each launch."""
        for place, launch_id in enumerate(launch_ids[:_MOST_LAUNCHES]):
            beside = f" {place + 1}" if place else ""
            for label, name in (("config", _CONFIG), ("log", self._log(launch_id))):
                if name is not None and not (place and label == "config"):
                    yield from self._link(f"{label}{beside}", launch_id, name)

    def _log(self, launch_id: str) -> str | None:
        """Return the name of the log to open first: the log named in the launch's report, else rank 0's."""
        folder = self.view.folder
        if folder is None:
            return None
        directory = RunDirectory(Path(launch_id))
        paths = (row.report.log_path for row in self.view.launches if row.report.launch_id == launch_id)
        named = Path(next(paths, "")).name
        usual = (named, directory.stderr(0).name, directory.stdout(0).name, directory.agent_log.name)
        return next((name for name in usual if name and file_of(folder, launch_id, name) is not None), None)

    def _link(self, label: str, launch_id: str, name: str) -> Iterator[FileLink]:
        folder = self.view.folder
        path = None if folder is None else file_of(folder, launch_id, name)
        if path is None:
            return
        if self.page is None:
            href = "/" + "/".join(quote(part, safe="") for part in (LIVE_FILES, launch_id, name))
        else:
            href = quote(os.path.relpath(path, self.page.resolve()).replace(os.sep, "/"))
        yield FileLink(label=label, launch_id=launch_id, href=href)
