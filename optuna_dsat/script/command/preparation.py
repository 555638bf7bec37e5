"""Preparations of a command before its launch: a config that it writes, folders, copies of data.

The command runs in overlays. Its changes are copied to a folder, and the world of each trial gets them
(``runtime.isolation.prepared``), so the user's files stay as they are.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.isolation import prepared
from optuna_dsat.runtime.isolation.world import World, plan_apart
from optuna_dsat.script.command.interceptor import program

_CONFIGS = frozenset({".json", ".hjson", ".yaml", ".yml", ".toml"})
"""Suffixes of files that a command may write anew each time, and that this process reads as well."""
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Files that a command has made, changed or removed before its launch."""

    folder: str = ""
    """Folder with copies (``runtime.isolation.prepared``); empty for none."""
    paths: Sequence[str] = ()
    omitted: Sequence[str] = ()
    """Paths that are too large to be kept."""

    def named(self, word: str, cwd: Path) -> str:
        """Return an argument or a variable that names the copy instead of the config that the command has written."""
        flag, equals, value = word.rpartition("=")
        path = os.path.normpath(cwd / value)
        copy = Path(f"{self.folder}{path}")
        is_config = self.folder and copy.suffix in _CONFIGS and copy.is_file() and not copy.is_symlink()
        return f"{flag}{equals}{copy}" if is_config else word

    def notices(self, cwd: Path) -> Iterator[str]:
        """Yield sentences on the files."""
        if self.paths:
            yield (
                f"It has made, changed or removed {_listed(self.paths, cwd)}: trials see that, your files stay as they "
                "are. For training, run these steps first."
            )
        if self.omitted:
            yield f"It has made {_listed(self.omitted, cwd)}, too large for trials: make it beforehand."


@functools.cache
def until_exit() -> Path:
    """Return a folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="optuna-dsat-prepared-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def keep_prepared(rank: Mapping[str, Any], *, folder: Path, into: Path) -> Prepared:
    """Keep the files that a command has made, changed or removed in its overlays, until its launch.

    A working directory or script of the launch that does not exist is created: this process examines both. Of files
    that are written anew each time, this process and the trials read the copies that the launch is made to name.
    """
    root, cwd = Path(f"/proc/{rank['process']}/root"), Path(rank["folder"])
    for path in (cwd, *(cwd / word for word in program(rank["words"])[:1])):
        seen = root / str(path).lstrip("/")
        with contextlib.suppress(OSError):
            if seen.is_dir() and not path.exists():
                shutil.copytree(seen, path, symlinks=True)
            elif seen.is_file() and not path.exists():
                shutil.copy(seen, path)
    plan = plan_apart(str(folder))
    world = World.load(plan.record)
    without = {*world.passed, *_output_of(rank["process"])}
    overlays = world.layers(root, plan)
    named = "\n".join([*rank["words"], *rank["environment"].values()])
    changed = [
        path
        for overlay in overlays
        for path in prepared.changes(root, *overlay)
        if path not in without and not (_is_unused(root, path) and path not in named)
    ]
    changed.sort(key=lambda path: not path.startswith(f"{cwd}/"))
    if not changed:
        return Prepared()
    copies = folder / "prepared"
    copies.mkdir()
    omitted = prepared.keep(changed, root=root, folder=copies)
    result = into / f"prepared-{_digest(copies)}"
    if not result.is_dir():
        into.mkdir(parents=True, exist_ok=True)
        shutil.move(copies, result)
    return Prepared(folder=str(result), paths=[path for path in changed if path not in omitted], omitted=omitted)


def missing_files(copies: Path, folder: Path = Path("/")) -> Iterator[str]:
    """Yield the paths that a folder of prepared files has and this machine has not; of folders, their own path."""
    for copy in sorted(copies.iterdir()) if copies.is_dir() else ():
        path = folder / copy.name
        is_removed = copy.is_symlink() and copy.readlink() == Path(prepared.REMOVED)
        if not (is_removed or os.path.lexists(path)):
            yield str(path)
        elif copy.is_dir() and not copy.is_symlink():
            yield from missing_files(copy, path)


def _is_unused(root: Path, path: str) -> bool:
    """Return whether a path is a temporary folder without content, as libraries and launchers create for themselves.

    Empty files, such as logs of ranks that are not started, are no content.
    """
    begins = os.path.join(tempfile.gettempdir(), tempfile.gettempprefix())  # noqa: PTH118 - compared as text
    seen = root / path.lstrip("/")
    if not path.startswith(begins) or not seen.is_dir() or seen.is_symlink():
        return False
    return not any(file.is_symlink() or (file.is_file() and file.stat().st_size) for file in seen.rglob("*"))


def _output_of(process: int) -> Iterator[str]:
    """Yield the files to which a process writes its output: logs of the launch."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            yield str(Path(f"/proc/{process}/fd/{descriptor}").readlink())


def _digest(folder: Path) -> str:
    """Return a digest of the names, links and contents of a folder."""
    result = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content = str(path.readlink()) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        result.update(f"{path.relative_to(folder)}:{len(content)}:{content}".encode(errors="surrogateescape"))
    return result.hexdigest()[:12]


def _listed(paths: Sequence[str], cwd: Path) -> str:
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return ", ".join(path.removeprefix(f"{cwd}/") for path in paths[:_MOST_NAMED]) + more
