"""Removal of locks that a killed launch leaves in torch's folder of compiled extensions.

DeepSpeed compiles its operators on first use. torch guards a build with a lock *file*, whose existence is the lock
(``torch.utils.file_baton``), and waits for its removal without limit, so a rank that is killed while it builds would
make every later launch hang.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["extensions_dir", "remove_stale_locks", "sign_lock"]

_ABANDONED_S = 600.0
"""Age from which a lock that no process of this machine has open is stale: builds take 30 to 90 s."""


def extensions_dir(environ: Mapping[str, str]) -> Path:
    """Return torch's folder of compiled extensions for an environment (``torch.utils.cpp_extension``)."""
    if chosen := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def remove_stale_locks(environ: Mapping[str, str], *, made_after: float | None = None) -> tuple[Path, ...]:
    """Remove build locks that no living process holds; return them.

    torch keeps the lock file open while it builds, so an open file has a living builder. A home directory may be shared
    with other machines, whose processes are invisible here: a lock is removed only if it was made during a launch of
    this tuner that is over, is signed by a process of this machine that is gone, or is ten minutes old.

    Args:
        environ: Environment of the launch.
        made_after: Unix time at which the launch that is over began; None if there is none.
    """
    root = extensions_dir(environ)
    stale: list[Path] = []
    for path in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        try:
            made = path.stat().st_mtime
        except OSError:
            continue
        ours = made_after is not None and made >= made_after - 1.0
        if (ours or _signer_is_gone(path) or time.time() - made > _ABANDONED_S) and not _is_open(path):
            path.unlink(missing_ok=True)
            stale.append(path)
    return tuple(stale)


def sign_lock(path: Path) -> None:
    """Write into a lock which process of which machine made it: this one."""
    path.write_text(f"{platform.node()} {os.getpid()}\n", encoding="utf-8")


def _signer_is_gone(path: Path) -> bool:
    """Whether a lock is signed by a process of this machine that has ended."""
    try:
        machine, _, pid = path.read_text(encoding="utf-8").strip().rpartition(" ")
    except (OSError, ValueError):
        return False
    return machine == platform.node() and pid.isdigit() and not Path(f"/proc/{pid}").exists()


def _is_open(path: Path) -> bool:
    """Whether a process of this user has the file open."""
    target = str(path.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(descriptor.readlink()) == target:
                return True
        except OSError:
            continue
    return False
