"""Memory of this machine that can be used now: the limits of control groups count, its own and those above."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["available_memory_bytes"]

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def available_memory_bytes(*, membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> int:
    """Return what processes may allocate now without the kernel ending one.

    Args:
        membership: File that names the control groups of this process.
        root: Where control groups are mounted.
    """
    available = int(psutil.virtual_memory().available)
    return max(0, min([available, *_rooms(membership, root)]))


def _rooms(membership: Path, root: Path) -> Iterator[int]:
    """Yield the bytes that are left below each limit of the control groups, outermost first (cgroup v2 and v1)."""
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            folder, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts) + 1):
            room = _room(folder.joinpath(*parts[:count]), *names)
            if room is not None:
                yield room


def _room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Return the bytes that are left in a control group, read files counted as free; None if it has no limit."""
    try:
        limit, usage = (int((folder / name).read_text(encoding="ascii")) for name in (limit_name, usage_name))
        statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # no such group here, or its limit is "max"
        return None
    cache = next((int(line.split()[1]) for line in statistics if line.startswith(f"{cache_name} ")), 0)
    return limit - max(0, usage - cache)
