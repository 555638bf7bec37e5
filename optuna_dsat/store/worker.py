"""Identity of a worker process, by which other processes on the same machine can check whether it is alive."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from optuna_dsat.runtime.process_identity import process_space, start_ticks

__all__ = ["Worker", "this_worker"]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A process on a machine."""

    name: str
    """Host and process id, for display only."""
    machine: str
    """Boot and process namespace; process numbers and starts are comparable only if equal."""
    pid: int
    pid_started_at: float
    """Clock ticks from the machine's boot to the process's start, which no step of the wall clock changes; they tell
    processes of the same number apart.
    """

    def is_dead(self) -> bool:
        """Return whether the process is known to have ended; False if it is alive or on another machine."""
        if self.machine != process_space():
            return False
        start = start_ticks(self.pid)
        if start is not None:
            return start != self.pid_started_at
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return Path(f"/proc/{self.pid}").exists()  # a zombie; else this user may not see it, or nobody can here


def this_worker() -> Worker:
    """Return this process as a worker."""
    pid = os.getpid()
    start = start_ticks(pid)
    name = f"{socket.gethostname()}:{pid}"
    return Worker(name=name, machine=process_space(), pid=pid, pid_started_at=float(start or 0))
