"""How the user's files are protected from launches: the probe, its result in words, and changes all the same.

Subprocesses and libraries in C++ write past the redirection in Python. Their changes are found by comparing the folders
before and after the first launch, without reading any content.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from optuna_dsat.errors import ScriptFailedError
from optuna_dsat.launch.launch import Launch
from optuna_dsat.launch.protocol import Conditions, LaunchRequest
from optuna_dsat.runtime.isolation.mounts import why_no_overlay

PROTECTED = "Trials write to overlays: your files stay as they are."
_STRENGTH = ("off", "python", "mount")


def weakest_isolation(launches: Iterable[Conditions]) -> Conditions:
    """Return the conditions of the launch with the weakest protection of the user's files."""
    known = [each for each in launches if each.isolation in _STRENGTH]
    return min(known, key=lambda each: (_STRENGTH.index(each.isolation), not each.isolation_note), default=Conditions())


def describe_isolation(conditions: Conditions) -> str:
    """Describe in a sentence how the user's files were protected; empty if unknown."""
    if not conditions.isolation:
        return ""
    if conditions.isolation == "off":
        return "Trials run on your files as they are (--isolation off): what the script writes, they write."
    if conditions.isolation == "mount" and not conditions.isolation_note:
        return PROTECTED
    writers = "what Python writes is redirected; what other programs, spawned workers, h5py or OpenCV write is not"
    if conditions.isolation == "mount":
        return f"{PROTECTED} Without an overlay, {writers}: {conditions.isolation_note}."
    why = f" ({conditions.isolation_note})" if conditions.isolation_note else ""
    return f"Trials run without overlays{why}: {writers}."


_MOST_ENTRIES = 100_000
_LIMIT_S = 2.0
"""Bounds of one snapshot; what lies beyond them is not compared."""
_SKIPPED = frozenset({"__pycache__", ".git"})

State = tuple[int, int, int, int]
"""Mode, size, time of modification in ns, inode."""


class Snapshot(NamedTuple):
    """The files below some folders."""

    files: Mapping[str, State]
    is_whole: bool
    """Whether it was taken within its bounds."""


class FolderWatch:
    """Compares the user's folders before and after profile launches and the first trial's, which has more steps.

    On a cluster these are the head's: what nodes change in folders that they do not share with it is not seen.
    """

    def __init__(self, output_dir: Path, *, own_files: Collection[str] = ()) -> None:
        self._output_dir = output_dir
        self._own_files = own_files
        self._begun = self._had_trial = False
        self._before: Snapshot | None = None

    def begin(self, request: LaunchRequest, *, here: Path | None = None) -> str:
        """Note the folders' state before a profile launch, or before the first trial's.

        Returns:
            A sentence for the user if a launch on this machine can change the user's files; else empty.

        Args:
            request: The launch.
            here: Run directory of a launch on this machine, which is not watched if root gets overlays: in a user
                namespace, some folders may have none.
        """
        is_trial = request.purpose != "profile"
        if request.isolation == "off" or (self._had_trial and is_trial):
            return ""
        was_shown = is_trial and self._begun
        self._begun, self._had_trial = True, is_trial
        why = "" if here is None or request.isolation == "python" else why_no_overlay(here)
        is_redirected = here is not None and (request.isolation == "python" or bool(why))
        if here is None or is_redirected or os.geteuid():
            self._before = self._users_files(request)
        shown = is_redirected and not was_shown
        return describe_isolation(Conditions(isolation="python", isolation_note=why)) if shown else ""

    def check(self, launch: Launch) -> None:
        """End the search where a launch without overlays has changed the user's files all the same.

        Raises:
            ScriptFailedError: Names the first changed file.
        """
        before, self._before = self._before, None
        conditions = launch.conditions  # with a note, folders of the command have no overlays
        if before is None or (conditions.isolation != "python" and not conditions.isolation_note):
            return
        after = self._users_files(launch.request)
        logs = _open_in_this_pipeline()
        if changes := [path for path in changed_paths(before, after) if after.files.get(path, ())[3:] not in logs]:
            more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
            raise ScriptFailedError(
                f"A launch changed {changes[0]}{more}: a subprocess or a library writes there, which cannot "
                f"be redirected without overlays. Allow it with --writable {shlex.quote(changes[0])}, or run where "
                "overlays can be mounted (optuna-dsat doctor). If you changed it yourself, run the command again.",
                log_path=str(launch.directory.stdout(0)),
            )

    def _users_files(self, request: LaunchRequest) -> Snapshot:
        command = request.command
        script = os.path.dirname(command.script) if os.path.isabs(command.script) else command.cwd  # noqa: PTH117, PTH120
        without = [str(self._output_dir.resolve().parent), *request.writable, *self._own_files]
        return snapshot([command.cwd, script], without=without)


def _open_in_this_pipeline() -> frozenset[tuple[int, ...]]:
    """Return the inodes of the files that the processes of a shell's pipeline have open, such as the log of ``tee``."""
    result: set[tuple[int, ...]] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if os.getpgid(int(process.name)) == os.getpgrp():
                for opened in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        result.add((opened.stat().st_ino,))
    return frozenset(result)


def snapshot(folders: Collection[str], *, without: Collection[str]) -> Snapshot:
    """Return the files below folders, except for ``without`` and all below."""
    result: dict[str, State] = {}
    ahead, ends = [*dict.fromkeys(folders)], time.monotonic() + _LIMIT_S
    left_out = {os.path.realpath(path) for path in without}
    while ahead and len(result) < _MOST_ENTRIES and time.monotonic() < ends:
        try:
            with os.scandir(ahead.pop(0)) as entries:
                for entry in entries:
                    if entry.name in _SKIPPED or os.path.realpath(entry.path) in left_out:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                        continue
                    status = entry.stat(follow_symlinks=False)
                    result[entry.path] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
        except OSError:  # removed meanwhile, or another user's
            continue
    return Snapshot(result, is_whole=not ahead)


def changed_paths(before: Snapshot, after: Snapshot) -> Sequence[str]:
    """Return the files that were changed, made or removed between two snapshots, sorted.

    Unless both are whole, which files they have depends on the speed of the disk: only common ones are compared.
    """
    old, new = before.files, after.files
    paths = old.keys() | new.keys() if before.is_whole and after.is_whole else old.keys() & new.keys()
    return sorted(path for path in paths if old.get(path) != new.get(path))
