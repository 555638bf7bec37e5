"""Changes of the user's folders during a launch whose writers are only redirected in Python.

Subprocesses and libraries in C++ write past the redirection. Their changes are found by comparing the folders before
and after the first launch, without reading any content.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence

__all__ = ["State", "changed_paths", "snapshot"]

_MOST_ENTRIES = 100_000
_LIMIT_S = 2.0
"""Bounds of one snapshot; what lies beyond them is not compared."""
_SKIPPED = frozenset({"__pycache__", ".git"})

State = tuple[int, int, int, int]
"""Mode, size, time of modification in ns, inode."""


def snapshot(folders: Collection[str], *, without: Collection[str]) -> Mapping[str, State]:
    """Return path -> state of the files below folders.

    Args:
        folders: Absolute paths.
        without: Absolute paths that are left out, with all below them.
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
        except OSError:  # removed meanwhile, or another user's
            continue
    return found


def changed_paths(before: Mapping[str, State], after: Mapping[str, State]) -> Sequence[str]:
    """Return the files that were changed, made or removed between two snapshots, sorted."""
    if max(len(before), len(after)) >= _MOST_ENTRIES:
        before = {path: state for path, state in before.items() if path in after}
        after = {path: state for path, state in after.items() if path in before}
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
