"""Files that a command has prepared before its launch: kept from its overlays, restored in the world of each trial.

The folder of prepared files has a file's path below it: ``PREPARED/a/b`` is ``/a/b`` of a trial. A symbolic link to
``REMOVED`` represents a file or folder that the command has removed.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

REMOVED = "/.//removed"
_LINKED_BYTES = 2**20
"""Size of the smallest file that trials get as a link, which costs no copy."""
_MOST_BYTES = 2**30
"""Maximum size of all prepared files."""
_NOT_PREPARED = frozenset({"__pycache__", ".git"})


def changes(root: Path, folder: str, upper: Path) -> Iterator[str]:
    """Yield the paths that an overlay, mounted over a folder in ``root``, has made, changed or removed.

    Of a new or removed folder, only its own path. ``upper`` is the upper layer.
    """
    written, before, now = (_names(path) for path in (upper, Path(folder), _below(root, folder)))
    for name in sorted((written | (before - now)) - _NOT_PREPARED):
        path, inner = os.path.join(folder, name), upper / name
        seen = _below(root, path)
        if name in now and name in before and _is_dir(seen) and _is_dir(Path(path)):
            yield from changes(root, path, inner)
        elif _differs(seen, Path(path)):
            yield path


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:  # missing, or another user's
        return set()


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _is_dir(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _differs(seen: Path, before: Path) -> bool:
    """Return whether an entry was changed; a file that is empty now is a log of the launch, not a change."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(seen):
            return os.path.lexists(before)
        if seen.is_symlink() or before.is_symlink():
            return not (seen.is_symlink() and before.is_symlink() and os.readlink(seen) == os.readlink(before))
        if _is_dir(seen):
            return True
        if not stat.S_ISREG(seen.lstat().st_mode) or not seen.lstat().st_size:
            return False
        return not before.is_file() or not filecmp.cmp(seen, before, shallow=False)
    return False


def keep(paths: Sequence[str], *, root: Path, folder: Path) -> list[str]:
    """Copy the state of changed paths in ``root`` to a folder of prepared files; return those that are too large."""
    left, omitted = _MOST_BYTES, []
    for path in paths:
        seen, target = _below(root, path), _below(folder, path)
        size = _bytes_of(seen)
        if size > left:
            omitted.append(path)
            continue
        left -= size
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(seen, target)
    return omitted


def _bytes_of(path: Path) -> int:
    files = [path, *(Path(top, name) for top, _, names in os.walk(path) for name in names)]
    return sum(file.lstat().st_size for file in files if os.path.lexists(file))


def _copy(seen: Path, target: Path) -> None:
    with contextlib.suppress(OSError, shutil.Error):  # such as a socket, or removed meanwhile
        if _is_dir(seen):
            shutil.copytree(seen, target, symlinks=True)
        elif os.path.lexists(seen):
            shutil.copy2(seen, target, follow_symlinks=False)
        else:
            target.symlink_to(REMOVED)


def restore(folder: str) -> None:
    """Make the files below ``/`` as a folder of prepared files has them; called in the world of a launch."""
    for top, folders, files in os.walk(folder):
        path = top[len(folder.rstrip("/")) :] or "/"
        with contextlib.suppress(OSError):
            if not os.path.isdir(path):
                os.makedirs(path)
                shutil.copymode(top, path)
        for name in (*files, *(each for each in folders if os.path.islink(os.path.join(top, each)))):
            with contextlib.suppress(OSError):  # the user's launch would fail as well
                _restore(os.path.join(top, name), os.path.join(path, name))


def _restore(source: str, path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)
    if os.path.islink(source):
        target = os.readlink(source)
        if target != REMOVED:
            os.symlink(target, path)
    elif os.path.getsize(source) < _LINKED_BYTES:
        shutil.copy2(source, path)
    else:
        os.symlink(source, path)
