"""Whether the processes of a launch work while no event comes: a checkpoint loads, an operator compiles.

Work is CPU time or bytes read and written, since the look before. Once the ranks train, their own work says nothing any
more: a rank that waits for another in a collective may spin. What runs below them, a compiler, still does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from optuna_dsat.launch.processes import ProcessKey

__all__ = ["MOST_SILENCES", "Reading", "WorkWatch", "read_processes"]

MOST_SILENCES = 3
"""Limits after which work alone, without an event, keeps a launch alive no longer: ranks may spin in their first step
for ever.
"""

_LOOK_S = 5.0
"""Time between two looks: a look costs some milliseconds."""
_LOOKS_PER_LIMIT = 4
"""Looks within a short limit, at least."""
_BUSY_CORES = 0.05
"""Cores that one process keeps busy if it works. A rank that waits on a socket with its helper threads takes less than
a hundredth; one that loads or compiles takes most of a core.
"""
_BUSY_BYTES = 2**20
"""Bytes between two looks that are no trickle: logs and heartbeats write kilobytes, a slow disk reads far more."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one process has done since it started."""

    cpu_s: float = 0.0
    """CPU time of its own."""
    ended_cpu_s: float = 0.0
    """CPU time of its children that have ended and were waited for, and of theirs."""
    io_bytes: int = 0
    """Read and written, through system calls and from disk; 0 where that is not told."""


class WorkWatch:
    """Tells when the processes of a launch were last seen to work, from readings taken while no event comes.

    Args:
        limit_s: Longest silence of the launch.
        started: When the launch was started. All times are monotonic.
    """

    def __init__(self, *, limit_s: float, started: float) -> None:
        self._interval_s = min(_LOOK_S, limit_s / _LOOKS_PER_LIMIT)
        self._work_counts_s = (MOST_SILENCES - 1) * limit_s
        self._looked = started
        self._readings: Mapping[ProcessKey, Reading] | None = None
        self.last_work: float | None = None
        """When work was last seen; None if never."""

    def last_sign(self, last_event: float) -> float:
        """Return when the launch last gave a sign of life: an event or, for some limits after it, work."""
        worked = last_event if self.last_work is None else min(self.last_work, last_event + self._work_counts_s)
        return max(last_event, worked)

    def is_due(self, now: float, *, last_event: float) -> bool:
        """Return whether it is time for a look: the launch has been silent, and the last look is not just over."""
        return now - max(self._looked, last_event) >= self._interval_s

    def look(
        self,
        readings: Mapping[ProcessKey, Reading],
        now: float,
        *,
        last_event: float,
        ranks: Collection[ProcessKey],
        trained: bool,
    ) -> None:
        """Compare with the look before, if there was one in this silence.

        Args:
            readings: Ranks and everything below them.
            now: When they were taken.
            last_event: When the launch fell silent.
            ranks: Those of ``readings`` that are ranks.
            trained: Whether a step was measured: then what ranks do themselves does not count.
        """
        before, looked = self._readings, self._looked
        self._readings, self._looked = readings, now
        if before is None or looked < last_event:
            return
        since_s = now - looked
        for key, new in readings.items():
            old = before.get(key, Reading())
            ended_s = new.ended_cpu_s - old.ended_cpu_s
            own_counts = not (trained and key in ranks)
            busy_s = ended_s + (new.cpu_s - old.cpu_s if own_counts else 0.0)
            moved_bytes = new.io_bytes - old.io_bytes if own_counts else 0
            if busy_s >= _BUSY_CORES * since_s or moved_bytes >= _BUSY_BYTES:
                self.last_work = now
                return


def read_processes(keys: Iterable[ProcessKey]) -> dict[ProcessKey, Reading]:
    """Return what each process has done so far, without those that have ended or may not be looked at."""
    found: dict[ProcessKey, Reading] = {}
    for key in keys:
        with suppress(psutil.Error):
            process = psutil.Process(key.pid)
            times = process.cpu_times()
            reading = Reading(
                cpu_s=times.user + times.system,
                ended_cpu_s=times.children_user + times.children_system,
                io_bytes=_io_bytes(process),
            )
            if key.alive:  # a later process with the same number is another
                found[key] = reading
    return found


def _io_bytes(process: psutil.Process) -> int:
    try:
        io = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):  # another system than Linux, or another user
        return 0
    through_calls = io.read_chars + io.write_chars
    return int(through_calls + io.read_bytes + io.write_bytes)  # memory-mapped files show in the latter alone
