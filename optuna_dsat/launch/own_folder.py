"""The user's own folder on this machine, for notes that outlive a killed tuner, not a restart of the machine."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from optuna_dsat.errors import UsageError

__all__ = ["own_folder"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def own_folder(*below: str, parent: Path | None = None) -> Path:
    """Return a folder that nobody else may read or write; made if it is missing.

    Args:
        below: Names of folders within it.
        parent: Where it lies; None for the system's folder for temporary files.

    Raises:
        UsageError: If another user, or a link, has taken its name.
    """
    root = (Path(tempfile.gettempdir()) if parent is None else parent) / f"optuna-dsat-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        text = f"{root} cannot be made: {error.strerror}. Set TMPDIR to a folder that can be written."
        raise UsageError(text) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UsageError(f"{root} is another user's, or no folder. Remove it, or set TMPDIR to a folder of your own.")
    if found.st_mode & _OTHERS:
        root.chmod(0o700)
    folder = root.joinpath(*below)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
