"""Watches what goes on beside a launch while its steps are measured.

CPU time of others is that of the cores that the launch may use, less that of the launch's own processes, between two
readings: the first when the warm-up ends, the last at the latest step. Readings are taken by the tuner, which counts as
another process, as do the launches of other slots.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from optuna_dsat.launch.conditions import Conditions
from optuna_dsat.launch.processes import ProcessKey, cpu_seconds
from optuna_dsat.runtime.events import EngineReady, Event, StepMeasured

__all__ = ["BesideWatch", "GpuSight", "busy_seconds"]

_READING_INTERVAL_S = 0.1
"""Shortest time between two readings of known processes, which take some tenths of a millisecond."""
_SEARCH_INTERVAL_S = 1.0
"""Shortest time between two searches for processes and two questions to NVML, which take milliseconds."""
_SHORTEST_WINDOW_S = 0.5
"""Windows below this say nothing: the kernel counts in hundredths of a second, for each core and each process."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_FIELDS = (0, 1, 2, 5, 6)
"""Fields after the name of a core in ``/proc/stat``: user, nice, system, irq and softirq (proc(5)); the first two
contain the time of guests.
"""


@dataclass(frozen=True, kw_only=True)
class GpuSight:
    """The GPUs of a launch at one moment."""

    processes: tuple[str, ...] = ()
    """Other processes that compute on them, in words."""
    throttle_reasons: tuple[str, ...] = ()
    """Reasons for lower clocks, in words."""


@dataclass(frozen=True, kw_only=True)
class _Reading:
    time: float
    busy_s: float
    own_s: Mapping[ProcessKey, float]
    """Process of the launch -> its CPU time, for those that have ended the last one known."""


@dataclass(kw_only=True)
class BesideWatch:
    """Compares the CPU time of the machine with that of one launch, and looks at its GPUs."""

    start_profile_step: int
    ranks: Callable[[], Collection[ProcessKey]]
    """Returns the ranks."""
    find: Callable[[], Collection[ProcessKey]]
    """Returns all processes of the launch that live now."""
    look: Callable[[Collection[int]], GpuSight] = lambda _: GpuSight()
    """Looks at the launch's GPUs, given its processes' numbers."""
    cores: Collection[int] = field(default_factory=lambda: os.sched_getaffinity(0))
    """Cores that the launch may use, as it inherits them from this process."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._first: _Reading | None = None
        self._last: _Reading | None = None
        self._found: set[ProcessKey] = set()
        self._searched_at: float | None = None
        self._gpu_processes: dict[str, None] = {}
        self._throttle_reasons: dict[str, None] = {}

    def update(self, events: Sequence[Event]) -> None:
        """Take a reading if new events of the launch hold the end of the warm-up or of a step that counts."""
        if not any(map(self._is_boundary, events)):
            return
        now = self.clock()
        if self._last is not None and now - self._last.time < _READING_INTERVAL_S:
            return
        if self._searched_at is None or now - self._searched_at >= _SEARCH_INTERVAL_S:
            self._searched_at = now
            self._search()
        reading = self._read()
        if reading is not None:
            self._first = self._first or reading
            self._last = reading

    def _is_boundary(self, event: Event) -> bool:
        """Return whether an event is at the beginning of the first step that counts, or at the end of a later one."""
        if isinstance(event, StepMeasured):
            return event.number >= self.start_profile_step - 1 and not event.skipped
        return isinstance(event, EngineReady) and self.start_profile_step == 1

    def _search(self) -> None:
        self._found |= set(self.find())
        sight = self.look({key.pid for key in self._found})
        self._gpu_processes |= dict.fromkeys(sight.processes)
        self._throttle_reasons |= dict.fromkeys(sight.throttle_reasons)

    def _read(self) -> _Reading | None:
        """Return a reading; None if a rank is gone, since its CPU time is not known then, or ``/proc`` is not there."""
        now, busy_s = self.clock(), busy_seconds(self.cores)
        times = {key: cpu_seconds(key) for key in self._found}
        if busy_s is None or any(times.get(key) is None for key in self.ranks()):
            return None
        before = {} if self._last is None else self._last.own_s
        own_s = {key: before.get(key, 0.0) if spent is None else spent for key, spent in times.items()}
        return _Reading(time=now, busy_s=busy_s, own_s=own_s)

    @property
    def conditions(self) -> Conditions:
        """What went on so far; CPU times are None if the steps took too short a time to tell."""
        on_gpus = Conditions(gpu_processes=tuple(self._gpu_processes), throttle_reasons=tuple(self._throttle_reasons))
        first, last = self._first, self._last
        if first is None or last is None or last.time - first.time < _SHORTEST_WINDOW_S:
            return on_gpus
        own_s = sum(spent - first.own_s.get(key, 0.0) for key, spent in last.own_s.items())
        return replace(
            on_gpus,
            window_s=last.time - first.time,
            others_cpu_s=max(0.0, last.busy_s - first.busy_s - own_s),
            cores=len(self.cores),
        )


def busy_seconds(cores: Collection[int]) -> float | None:
    """Return the time that processes have used cores since the machine's start; None if unknown."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in cores}
    rows = [words[1:] for line in lines if (words := line.split()) and words[0] in names]
    return sum(int(row[index]) for row in rows for index in _BUSY_FIELDS) / _TICKS_PER_S
