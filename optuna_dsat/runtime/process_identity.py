"""Identity of a process: the scope of its process number, the number, its start time, and its command."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

START_TIME_FIELD = 19
"""Index of the start time (clock ticks since boot) in ``stat_fields``."""


@functools.cache
def process_space(namespace: str = "pid") -> str:
    """Return the scope of this process's numbers, or of its addresses (``net``), as ``<boot id>:<namespace>``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{Path('/proc/self/ns', namespace).stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()}:0"


def stat_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the command's name (proc(5)); empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if it has ended (also for zombies)."""
    fields = stat_fields(pid)
    return None if not fields or fields[0] in ("Z", "X") else int(fields[START_TIME_FIELD])


def read_command(pid: int) -> list[str]:
    """Return the command line of a process; empty if it is gone or has none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(word) for word in words if word]
