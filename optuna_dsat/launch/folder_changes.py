"""Detect changes of the user's folders during a launch whose writes are only redirected in Python.

Subprocesses and C++ libraries bypass the redirection. Their changes are found by comparing the folders before and
after the first launch, without reading any content.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from optuna_dsat.errors import ScriptFailedError
from optuna_dsat.launch.launch import RunningLaunch
from optuna_dsat.launch.protocol import LaunchRequest

__all__ = ["FolderWatch", "State", "changed_paths", "snapshot"]

_MOST_ENTRIES = 100_000
_LIMIT_S = 2.0
"""Limits of a snapshot; entries beyond them are not compared."""
_SKIPPED = frozenset({"__pycache__", ".git"})

State = tuple[int, int, int, int]
"""Mode, size, modification time in ns, inode."""


class FolderWatch:
    """Compares the user's folders before and after the profile launch.

    On a cluster these are the head's folders. Changes by nodes in folders that are not shared with the head are not
    detected.

    Args:
        output_dir: Folder of the study's launches.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._before: Mapping[str, State] | None = None

    def begin(self, request: LaunchRequest) -> None:
        """Record the folders' state before a launch."""
        self._before = self._users_files(request)

    def check(self, launch: RunningLaunch) -> None:
        """Raise if a launch without overlays has changed the user's files, which ends the search.

        Raises:
            ScriptFailedError: Names the first changed file.
        """
        before, self._before = self._before, None
        if before is None or launch.conditions.isolation != "python":
            return
        if changes := changed_paths(before, self._users_files(launch.request)):
            more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
            raise ScriptFailedError(
                f"The profile launch changed {changes[0]}{more}: a subprocess or a library writes there, which cannot "
                f"be redirected without overlays. Allow it with --writable {shlex.quote(changes[0])}, or run where "
                "overlays can be mounted (optuna-dsat doctor).",
                log_path=str(launch.directory.stdout(0)),
            )

    def _users_files(self, request: LaunchRequest) -> Mapping[str, State]:
        command = request.command
        script = os.path.dirname(command.script) if os.path.isabs(command.script) else command.cwd  # noqa: PTH117, PTH120
        without = [str(self._output_dir.resolve().parent), *request.writable]
        return snapshot([command.cwd, script], without=without)


def snapshot(folders: Collection[str], *, without: Collection[str]) -> Mapping[str, State]:
    """Return path -> state of the files in folders, recursively.

    Args:
        folders: Absolute paths.
        without: Absolute paths to exclude, with everything below them.
    """
    found: dict[str, State] = {}
    ahead, ends = [*dict.fromkeys(folders)], time.monotonic() + _LIMIT_S
    left_out = {os.path.realpath(path) for path in without}
    while ahead and len(found) < _MOST_ENTRIES and time.monotonic() < ends:
        try:
            with os.scandir(ahead.pop(0)) as entries:
                for entry in entries:
                    if entry.name in _SKIPPED or os.path.realpath(entry.path) in left_out:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                        continue
                    status = entry.stat(follow_symlinks=False)
                    found[entry.path] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
        except OSError:  # removed meanwhile, or not readable
            continue
    return found


def changed_paths(before: Mapping[str, State], after: Mapping[str, State]) -> Sequence[str]:
    """Return the files that were changed, created or removed between two snapshots, sorted."""
    if max(len(before), len(after)) >= _MOST_ENTRIES:
        before = {path: state for path, state in before.items() if path in after}
        after = {path: state for path, state in after.items() if path in before}
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
