"""Identity of a worker process, by which other processes on the same machine can check whether it is alive."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

__all__ = ["Worker", "this_worker"]

_START_TOLERANCE_S = 2.0
"""psutil derives a process's start from the boot time, which clock corrections shift slightly."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A process on a machine."""

    name: str
    """Host and process id, for display only."""
    machine: str
    """Boot id and process namespace; process ids are comparable only if equal."""
    pid: int
    pid_started_at: float
    """Unix time at which the process started; distinguishes processes with a reused id."""

    def is_dead(self) -> bool:
        """Return whether the process is known to have ended; False if it is alive or on another machine."""
        if self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.pid_started_at) <= _START_TOLERANCE_S
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


def this_worker() -> Worker:
    """Return this process as a worker."""
    pid = os.getpid()
    return Worker(
        name=f"{socket.gethostname()}:{pid}",
        machine=_machine(),
        pid=pid,
        pid_started_at=psutil.Process(pid).create_time(),
    )


@cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
    return f"{boot} {namespace}"
