"""Activity of a launch's processes between events, as while a checkpoint loads or an operator compiles.

Activity is CPU time, or bytes read and written, since the previous reading. Once the ranks train, their own is ignored,
since a rank that waits in a collective may spin; that of their descendants, such as a compiler, still counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from optuna_dsat.launch.processes import ProcessKey

__all__ = ["MAX_STALL_LIMITS", "ActivityMonitor", "ProcessUsage", "read_usage"]

MAX_STALL_LIMITS = 3
"""Silence, in multiples of the stall limit, after which activity no longer keeps a launch alive: ranks may spin in
their first step for ever.
"""

_READING_INTERVAL_S = 5.0
"""Time between two readings; each takes some milliseconds."""
_READINGS_PER_LIMIT = 4
"""Fewest readings within a stall limit."""
_BUSY_CORES = 0.05
"""Cores above which a process counts as active. A rank that waits on a socket, with its helper threads, takes less than
a hundredth; one that loads or compiles takes most of a core.
"""
_BUSY_BYTES = 2**20
"""Bytes between two readings above which a process counts as active: logs and heartbeats write kilobytes."""


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """Resources that one process has used since its start."""

    cpu_s: float = 0.0
    """CPU time of its own."""
    ended_cpu_s: float = 0.0
    """CPU time of its descendants that have ended and were waited for."""
    io_bytes: int = 0
    """Bytes read and written, by system calls and from disk; 0 if unknown."""


class ActivityMonitor:
    """Tracks when the processes of a launch were last active, from readings taken between events.

    Args:
        limit_s: Longest time without an event or activity.
        started: Start of the launch. All times are monotonic.
    """

    def __init__(self, *, limit_s: float, started: float) -> None:
        self._interval_s = min(_READING_INTERVAL_S, limit_s / _READINGS_PER_LIMIT)
        self._work_counts_s = (MAX_STALL_LIMITS - 1) * limit_s
        self._read_at = started
        self._readings: Mapping[ProcessKey, ProcessUsage] | None = None
        self.last_work: float | None = None
        """Time of the last activity seen; None if never."""

    def last_activity(self, last_event: float) -> float:
        """Return the time of the last event or, up to ``MAX_STALL_LIMITS`` stall limits after it, activity."""
        worked = last_event if self.last_work is None else min(self.last_work, last_event + self._work_counts_s)
        return max(last_event, worked)

    def is_due(self, now: float, *, last_event: float) -> bool:
        """Return whether a reading is due: long enough after the last event and the last reading."""
        return now - max(self._read_at, last_event) >= self._interval_s

    def update(
        self,
        readings: Mapping[ProcessKey, ProcessUsage],
        now: float,
        *,
        last_event: float,
        ranks: Collection[ProcessKey],
        trained: bool,
    ) -> None:
        """Compare with the previous reading, if there was one since the last event.

        Args:
            readings: Use of the ranks and all their descendants.
            now: Time of the readings.
            last_event: Time of the last event.
            ranks: The ranks among ``readings``.
            trained: Whether a step was measured, after which the ranks' own activity does not count.
        """
        before, read_at = self._readings, self._read_at
        self._readings, self._read_at = readings, now
        if before is None or read_at < last_event:
            return
        since_s = now - read_at
        for key, new in readings.items():
            old = before.get(key, ProcessUsage())
            ended_s = new.ended_cpu_s - old.ended_cpu_s
            own_counts = not (trained and key in ranks)
            busy_s = ended_s + (new.cpu_s - old.cpu_s if own_counts else 0.0)
            moved_bytes = new.io_bytes - old.io_bytes if own_counts else 0
            if busy_s >= _BUSY_CORES * since_s or moved_bytes >= _BUSY_BYTES:
                self.last_work = now
                return


def read_usage(keys: Iterable[ProcessKey]) -> dict[ProcessKey, ProcessUsage]:
    """Return the resources used by each process, except those that have ended or cannot be read."""
    found: dict[ProcessKey, ProcessUsage] = {}
    for key in keys:
        with suppress(psutil.Error):
            process = psutil.Process(key.pid)
            times = process.cpu_times()
            reading = ProcessUsage(
                cpu_s=times.user + times.system,
                ended_cpu_s=times.children_user + times.children_system,
                io_bytes=_io_bytes(process),
            )
            if key.alive:  # else the number may be that of a later process
                found[key] = reading
    return found


def _io_bytes(process: psutil.Process) -> int:
    try:
        io = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):  # another system than Linux, or another user
        return 0
    through_calls = io.read_chars + io.write_chars
    return int(through_calls + io.read_bytes + io.write_bytes)  # memory-mapped files count only in the latter
