"""The processes of a launch: torchrun, the ranks and their descendants."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from optuna_dsat.launch.machine.processes import end_with_descendants, find_marked, has_mark, refuse_survivors
from optuna_dsat.launch.machine.shared_memory import SharedMemoryWatch
from optuna_dsat.runtime.adapt.journal import note
from optuna_dsat.runtime.agent.processes import (
    Ending,
    ProcessKey,
    child_pids,
    children_of,
    end_processes,
    stop_processes,
)
from optuna_dsat.runtime.files import read_regular
from optuna_dsat.runtime.process_identity import process_space


class AgentHandle(Protocol):
    """A running torchrun, such as a ``subprocess.Popen``."""

    @property
    def pid(self) -> int:
        """Process number."""

    @property
    def returncode(self) -> int | None:
        """Exit code (negative: signal) at the last ``poll`` or ``wait``; None if it was running."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""


def _load_failures(record: Path) -> list[Mapping[str, float]]:
    try:
        failures = json.loads(read_regular(record))["failures"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [failure for failure in failures if {"rank", "pid", "exit_code", "time"} <= failure.keys()]


def read_exit_codes(record: Path, *, without: Collection[int] = ()) -> dict[int, int]:
    """Return rank -> exit code as recorded by the agent, except for the processes in ``without``."""
    return {
        int(failure["rank"]): int(failure["exit_code"])
        for failure in _load_failures(record)
        if failure["pid"] not in without
    }


def first_failure_code(record: Path) -> int | None:
    """Return the exit code (negative: signal) of the rank that failed first; None if the agent recorded none.

    torchrun counts in whole seconds and also lists the ranks that it ended itself (SIGTERM). If two ranks ended within
    the same second and a signal killed one of them, that rank is the cause: the other lost its connection to it.
    """

    def order(failure: Mapping[str, float]) -> tuple[bool, float, bool]:
        code = failure["exit_code"]
        killed = code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT)
        return code == -signal.SIGTERM, failure["time"], not killed

    failures = sorted(_load_failures(record), key=order)
    return int(failures[0]["exit_code"]) if failures else None


# Orphans of a launch: torchrun's agent adopts them, so they are found even if they detach.
#
# A daemon forks twice, starts a new session and may clear its environment, so neither its parents nor the launch's
# mark identify it. The kernel re-parents it to the nearest ancestor that adopts orphans (prctl(2),
# ``PR_SET_CHILD_SUBREAPER``): the agent or, if that was killed, the process from which launches are forked. Processes
# that may outlive both are recorded, so that the next start ends them.

_PAUSE_S = 0.5
"""Interval between checks of a launch's processes; each takes about a millisecond per rank."""


class OrphanWatch:
    """Finds the processes of a launch while they live, and records processes that have lost its mark."""

    def __init__(self, roots: Callable[[], Iterable[ProcessKey]], *, mark: str, record: Path | None = None) -> None:
        self._roots = roots
        self._mark = mark
        self._record = record
        self._found: set[ProcessKey] = set()
        self._look_at = 0.0

    def check(self, now: float) -> Collection[ProcessKey]:
        """Return all processes found so far; ``now`` is monotonic."""
        if now >= self._look_at:
            new = self._descendants() - self._found
            self._look_at = now + _PAUSE_S
            self._found |= new
            for key in new:
                if self._record is not None and not has_mark(key.pid, self._mark):
                    line = {"pid": key.pid, "start_ticks": key.start_ticks, "space": process_space()}
                    note(self._record, line)
        return self._found

    def _descendants(self) -> set[ProcessKey]:
        processes: set[ProcessKey] = set()
        ahead = [key for key in self._roots() if key.alive]
        while ahead:
            keys = {key for pid in child_pids(ahead.pop().pid) if (key := ProcessKey.of(pid)) is not None}
            ahead += keys - processes
            processes |= keys
        return processes


def end_noted(values: Iterable[Any]) -> int:
    """End a journal's processes, if they are of this machine, and their descendants; return their number."""
    return end_with_descendants(key for value in values if (key := _noted(value)) is not None)


def _noted(value: Any) -> ProcessKey | None:
    if not isinstance(value, dict) or value.get("space") != process_space():
        return None
    pid, start = value.get("pid"), value.get("start_ticks")
    return ProcessKey(pid, start) if isinstance(pid, int) and isinstance(start, int) and pid > 1 else None


def end_launch(processes: ProcessTree) -> None:
    """Kill everything of a launch, and wait until it is gone."""
    began = time.monotonic()
    processes.kill_all()
    while not processes.sweep():
        refuse_survivors((key for key in processes.known if key.alive), since=began)
        time.sleep(0.01)


class ProcessTree:
    """Finds and kills the processes of a launch."""

    def __init__(self, agent: AgentHandle, *, mark: str, leavings: Path | None = None) -> None:
        self._agent = agent
        self._mark = mark
        self._agent_key = ProcessKey.of(agent.pid)
        self.rank_keys: dict[int, ProcessKey] = {}
        """Rank -> process, for the ranks seen so far."""
        self._known: set[ProcessKey] = set() if self._agent_key is None else {self._agent_key}
        self.killed: set[int] = set()
        """Numbers of the processes killed here."""
        self._shared_memory = SharedMemoryWatch(lambda: {key.pid for key in self.living()}, record=leavings)
        self._orphans = OrphanWatch(self._roots, mark=mark, record=leavings)
        self._ending = Ending()

    def _roots(self) -> set[ProcessKey]:
        return self.ranks if self._agent_key is None else {self._agent_key} | self.ranks

    @property
    def known(self) -> frozenset[ProcessKey]:
        """All processes of the launch seen so far."""
        return frozenset(self._known)

    @property
    def ranks(self) -> set[ProcessKey]:
        """The ranks seen so far."""
        return set(self.rank_keys.values())

    @property
    def shared_memory(self) -> frozenset[Path]:
        """Files in shared memory created by its processes, as far as observed."""
        return self._shared_memory.found

    def look(self, now: float) -> None:
        """Update its processes and their files in shared memory; ``now`` is monotonic."""
        self._known |= {*self._orphans.check(now)}
        self._shared_memory.check(now)

    def add_rank(self, rank: int, pid: int) -> None:
        """Record the process of a rank if it lives and belongs to this launch: a script could report any PID."""
        key = ProcessKey.of(pid)
        if key is not None and (has_mark(pid, self._mark) or key in self.descendants()):
            self._known.add(key)
            self.rank_keys[rank] = key

    def dead_ranks(self) -> set[int]:
        """Return the ranks whose process has ended."""
        return {rank for rank, key in self.rank_keys.items() if not key.alive}

    def descendants(self) -> set[ProcessKey]:
        """Return the living descendants of torchrun, and of ranks that were re-parented."""
        return children_of(self._roots())

    def living(self) -> set[ProcessKey]:
        """Return torchrun, the ranks, and all their living descendants."""
        return self.descendants() | self._roots()

    def _descendants_and_ranks(self) -> set[ProcessKey]:
        processes = self.descendants() | self.ranks
        self._known |= processes
        return processes

    def kill_ranks(self) -> None:
        """Kill everything but torchrun."""
        self._kill(self._descendants_and_ranks())

    def kill_all(self) -> None:
        """Kill all descendants of torchrun; ``sweep`` kills torchrun itself once they are gone.

        Until then torchrun is stopped, so that it does not start or signal ranks but still adopts orphans.
        """
        if self._agent_key is not None:
            stop_processes({self._agent_key})
        below = {key for key in self._descendants_and_ranks() if key.alive}
        self._kill(below)
        if not below and self._agent_key is not None:
            self._kill({self._agent_key})

    def sweep(self) -> bool:
        """Kill the remaining processes, also re-parented ones; return True once all are gone and torchrun is reaped.

        Call it repeatedly, since a process may start another while it is killed.
        """
        self._agent.poll()
        left = {process.key for process in find_marked(self._mark)}
        left |= children_of(left) | {key for key in self._known | self.descendants() if key.alive}
        below = left - {self._agent_key}
        if left:
            self._kill(below or left)
            return False
        return self._agent.returncode is not None

    def _kill(self, keys: set[ProcessKey]) -> None:
        alive = {key for key in keys if key.alive}
        self._known |= alive
        self._shared_memory.add(key.pid for key in alive)
        agent = {key for key in alive if key == self._agent_key}
        end_processes(agent)  # it is stopped and would not react to SIGTERM
        self.killed |= {key.pid for key in agent | self._ending.end(alive - agent)}
