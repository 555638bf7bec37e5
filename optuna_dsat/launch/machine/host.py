"""Activity of a launch's processes between events, such as while a checkpoint loads or an operator compiles.

Activity is CPU time, or bytes read and written, since the previous reading. Once the ranks train, their activity is
ignored because a rank that waits in a collective may spin. Activity of their descendants, such as a compiler, still
counts.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.processes import cpu_seconds
from optuna_dsat.launch.protocol import Conditions
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.events import EngineReady, Event, StepMeasured
from optuna_dsat.runtime.measure.memory import memory_limits

MAX_STALL_LIMITS = 3
"""Silence, in multiples of the stall limit, after which activity no longer keeps a launch alive: ranks may spin in
their first step forever."""

_READING_INTERVAL_S = 5.0
"""Interval between readings; each takes some milliseconds."""
_READINGS_PER_LIMIT = 4
"""Fewest readings within a stall limit."""
_BUSY_CORES = 0.05
"""Cores above which a process counts as active. A rank that waits on a socket, with its helper threads, uses less than
0.01 cores; a process that loads or compiles uses most of a core."""
_BUSY_BYTES = 2**20
"""Bytes between two readings above which a process counts as active: logs and heartbeats write kilobytes."""


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """Resources that a process has used since its start."""

    cpu_s: float = 0.0
    """CPU time of the process, without descendants."""
    ended_cpu_s: float = 0.0
    """CPU time of descendants that have ended and were waited for."""
    io_bytes: int = 0
    """Bytes read and written, by system calls and from disk; 0 if unknown."""


class ActivityMonitor:
    """Tracks when the processes of a launch were last active, from readings taken between events."""

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
        """Compare with the previous reading, if it was taken after the last event.

        ``readings`` cover the ranks and all their descendants. Once a step was measured (``trained``), the activity of
        ranks does not count.
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
    """Return the resources used by each process, except for processes that have ended or cannot be read."""
    result: dict[ProcessKey, ProcessUsage] = {}
    for key in keys:
        with suppress(psutil.Error):
            process = psutil.Process(key.pid)
            times = process.cpu_times()
            reading = ProcessUsage(
                cpu_s=times.user + times.system,
                ended_cpu_s=times.children_user + times.children_system,
                io_bytes=_io_bytes(process),
            )
            if key.alive:  # else the PID may have been reused
                result[key] = reading
    return result


def _io_bytes(process: psutil.Process) -> int:
    try:
        io = process.io_counters()
    except (psutil.AccessDenied, AttributeError, RuntimeError, ValueError):  # another user's, or the system counts none
        return 0
    through_calls = io.read_chars + io.write_chars
    return int(through_calls + io.read_bytes + io.write_bytes)  # memory-mapped files count only in the latter


def available_memory_bytes() -> int:
    """Return the memory that processes may allocate now without the kernel ending one."""
    return max(0, min([int(psutil.virtual_memory().available), *(left for _, left in memory_limits())]))


_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def own_folder(*below: str, parent: Path | None = None) -> Path:
    """Return a folder, by default for temporary files, that no other user can read or write; create it if missing.

    Raises:
        UsageError: If another user, or a link, has taken its name.
    """
    root = (Path(tempfile.gettempdir()) if parent is None else parent) / f"optuna-dsat-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        text = f"{root} cannot be made: {error.strerror}. Set TMPDIR to a folder that can be written."
        raise UsageError(text) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(f"{root} is another user's, or no folder. Remove it, or set TMPDIR to a folder of your own.")
    if status.st_mode & _OTHERS:
        root.chmod(0o700)
    folder = root.joinpath(*below)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


# Observes other activity on the machine while the steps of a launch are measured.
#
# CPU time of others is the CPU time of the cores available to the launch minus the CPU time of its processes, between
# two readings: the first at the end of the warm-up, the last at the latest step. Readings are taken by the tuner,
# which counts as another process, as do launches in other slots.
#
# The power of the GPUs is the difference of two readings of their energy counters over the time between them. The first
# is taken with the first reading, the last at the end of the last profile step, or at an earlier step's end at most a
# second before a launch was ended early: all lie within the counted steps, apart from the delay with which the tuner
# reads an event. Samples per joule is the throughput of the counted steps over this power.

_USE_INTERVAL_S = 0.1
"""Minimum interval between readings of known processes, which take some tenths of a millisecond."""
_SEARCH_INTERVAL_S = 1.0
"""Minimum interval between searches for processes and NVML queries, which take milliseconds."""
_SHORTEST_WINDOW_S = 0.5
"""Shortest usable window: the kernel counts in hundredths of a second, per core and per process."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_FIELDS = (0, 1, 2, 5, 6)
"""Fields after the name of a core in ``/proc/stat``: user, nice, system, irq and softirq (proc(5)); the first two
contain the time of guests.
"""


@dataclass(frozen=True, kw_only=True)
class _Reading:
    time: float
    busy_s: float
    own_s: Mapping[ProcessKey, float]
    """Process of the launch -> its CPU time; the last known value for ended processes."""


@dataclass(kw_only=True)
class BesideWatch:
    """Compares the CPU time of the machine and of a launch, and observes the launch's GPUs."""

    start_profile_step: int
    end_profile_step: int
    ranks: Callable[[], Collection[ProcessKey]]
    """Returns the ranks."""
    find: Callable[[], Collection[ProcessKey]]
    """Returns all living processes of the launch."""
    look: Callable[[Collection[int]], Conditions] = lambda _: Conditions()
    """Observes the launch's GPUs, given the PIDs of its processes."""
    energy_j: Callable[[], float | None] = lambda: None
    """Reads the energy counters of the launch's GPUs; None if they have none."""
    cores: Collection[int] = field(default_factory=lambda: os.sched_getaffinity(0))
    """Cores available to the launch, inherited from this process."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._first: _Reading | None = None
        self._last: _Reading | None = None
        self._found: set[ProcessKey] = set()
        self._searched_at: float | None = None
        self._is_over = False
        """Whether the last profile step was seen to end."""
        self._energy: tuple[tuple[float, float], ...] = ()
        """Time and joules of the first and the last reading of the energy counters."""
        self._gpu_processes: dict[str, None] = {}
        self._throttle_reasons: dict[str, None] = {}

    def update(self, events: Sequence[Event]) -> None:
        """Take a reading if the events include the end of the warm-up or of a counted step."""
        if not any(map(self._is_boundary, events)):
            return
        now = self.clock()
        was_over = self._is_over
        self._is_over |= any(isinstance(e, StepMeasured) and e.number >= self.end_profile_step for e in events)
        ends = self._is_over and not was_over
        if not ends and self._last is not None and now - self._last.time < _USE_INTERVAL_S:
            return
        if ends or self._searched_at is None or now - self._searched_at >= _SEARCH_INTERVAL_S:
            self._searched_at = now
            self._search()
            if not was_over and (used_j := self.energy_j()) is not None:
                self._energy = (*self._energy[:1], (self.clock(), used_j))
        reading = self._read()
        if reading is not None:
            self._first = self._first or reading
            self._last = reading

    def _is_boundary(self, event: Event) -> bool:
        """Return whether an event starts the first counted step or ends a later step."""
        if isinstance(event, StepMeasured):
            return event.number >= self.start_profile_step - 1 and not event.skipped
        return isinstance(event, EngineReady) and self.start_profile_step == 1

    def _search(self) -> None:
        self._found |= set(self.find())
        sight = self.look({key.pid for key in self._found})
        self._gpu_processes |= dict.fromkeys(sight.gpu_processes)
        self._throttle_reasons |= dict.fromkeys(sight.throttle_reasons)

    def _read(self) -> _Reading | None:
        """Return a reading; None without ``/proc``, or if a rank has ended and its CPU time is unknown."""
        now, busy_s = self.clock(), busy_seconds(self.cores)
        times = {key: cpu_seconds(key) for key in self._found}
        if busy_s is None or any(times.get(key) is None for key in self.ranks()):
            return None
        before = {} if self._last is None else self._last.own_s
        own_s = {key: before.get(key, 0.0) if spent is None else spent for key, spent in times.items()}
        return _Reading(time=now, busy_s=busy_s, own_s=own_s)

    @property
    def conditions(self) -> Conditions:
        """Activity observed so far; CPU times are None if the window is too short to measure them."""
        on_gpus = Conditions(
            gpu_processes=tuple(self._gpu_processes),
            throttle_reasons=tuple(self._throttle_reasons),
            power_w=self._power_w,
        )
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

    @property
    def _power_w(self) -> float | None:
        """Mean power between the readings of the energy counters; None if unknown or too short to measure."""
        if len(self._energy) < 2:
            return None
        (first, before_j), (last, after_j) = self._energy
        is_measured = last - first >= _SHORTEST_WINDOW_S and after_j > before_j
        return (after_j - before_j) / (last - first) if is_measured else None


def busy_seconds(cores: Collection[int]) -> float | None:
    """Return the CPU time of all processes on these cores since boot, in seconds; None if unknown."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in cores}
    rows = [words[1:] for line in lines if (words := line.split()) and words[0] in names]
    return sum(int(row[index]) for row in rows for index in _BUSY_FIELDS) / _TICKS_PER_S
