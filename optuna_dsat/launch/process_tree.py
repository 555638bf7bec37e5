"""The processes of one launch: torchrun, the ranks and their descendants."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from optuna_dsat.launch.activity import ProcessUsage, read_usage
from optuna_dsat.launch.agent_handle import AgentHandle
from optuna_dsat.launch.agent_record import read_exit_codes
from optuna_dsat.launch.ending import Ending, refuse_survivors
from optuna_dsat.launch.orphans import OrphanWatch
from optuna_dsat.launch.processes import (
    ProcessKey,
    children_of,
    end_processes,
    find_marked,
    has_mark,
    stop_processes,
)
from optuna_dsat.launch.shared_memory import SharedMemoryWatch

__all__ = ["LaunchProcesses", "ProcessTree", "end_launch"]


class LaunchProcesses(Protocol):
    """What a running launch asks of its processes and does to them, on this machine or on nodes of a cluster."""

    @property
    def known(self) -> frozenset[ProcessKey]:
        """All processes of the launch ever seen."""
        ...

    @property
    def ranks(self) -> set[ProcessKey]:
        """The ranks seen so far."""
        ...

    @property
    def shared_memory(self) -> frozenset[Path]:
        """Files in shared memory of this machine that its processes made."""
        ...

    def look(self, now: float) -> None:
        """Note its processes, and what they have made in shared memory so far; ``now`` is monotonic."""
        ...

    def add_rank(self, rank: int, pid: int) -> None:
        """Note the process of a rank, if it lives."""
        ...

    def dead_ranks(self) -> set[int]:
        """Return the ranks whose process has ended."""
        ...

    def living(self) -> Collection[ProcessKey]:
        """Return torchrun, the ranks, and all their living descendants."""
        ...

    def usage(self) -> Mapping[ProcessKey, ProcessUsage]:
        """Return what the ranks and all their descendants have used."""
        ...

    def exit_codes(self, record: Path) -> dict[int, int]:
        """Return rank -> exit code of those that torchrun saw fail and that were not killed by the launcher.

        Args:
            record: File that torchrun's agent leaves in the run directory.
        """
        ...

    def has_killed(self, pid: int) -> bool:
        """Return whether the launcher killed a process."""
        ...

    def kill_ranks(self) -> None:
        """Kill everything but torchrun."""
        ...

    def kill_all(self) -> None:
        """Kill everything, torchrun last: it adopts what loses its parent."""
        ...

    def sweep(self) -> bool:
        """Kill what remains; return whether none was left."""
        ...


def end_launch(processes: LaunchProcesses) -> None:
    """Kill everything of a launch, and wait until it is gone.

    Raises:
        TimeoutError: If processes outlive SIGKILL, which only an uninterruptible wait in the kernel explains.
    """
    began = time.monotonic()
    processes.kill_all()
    while not processes.sweep():
        refuse_survivors((key for key in processes.known if key.alive), since=began)
        time.sleep(0.01)


class ProcessTree:
    """Finds and kills the processes of a launch.

    Args:
        agent: torchrun.
        mark: Mark of the launch's processes.
        leavings: File that notes what they make in shared memory; None to note nothing.
    """

    def __init__(self, agent: AgentHandle, *, mark: str, leavings: Path | None = None) -> None:
        self._agent = agent
        self._mark = mark
        self._agent_key = ProcessKey.of(agent.pid)
        self._ranks: dict[int, ProcessKey] = {}
        self._known: set[ProcessKey] = set() if self._agent_key is None else {self._agent_key}
        self._killed: set[int] = set()
        self._shared_memory = SharedMemoryWatch(lambda: {key.pid for key in self.living()}, record=leavings)
        self._orphans = OrphanWatch(self._roots, mark=mark, record=leavings)
        self._ending = Ending()

    def _roots(self) -> set[ProcessKey]:
        return self.ranks if self._agent_key is None else {self._agent_key} | self.ranks

    @property
    def known(self) -> frozenset[ProcessKey]:
        """All processes of the launch ever seen."""
        return frozenset(self._known)

    @property
    def ranks(self) -> set[ProcessKey]:
        """The ranks seen so far."""
        return set(self._ranks.values())

    @property
    def killed(self) -> tuple[int, ...]:
        """Numbers of the processes that were killed here."""
        return tuple(self._killed)

    @property
    def shared_memory(self) -> frozenset[Path]:
        """Files in shared memory that its processes made, as far as they were seen to use them."""
        return self._shared_memory.found

    def look(self, now: float) -> None:
        """Note its processes, and what they have made in shared memory so far; ``now`` is monotonic."""
        self._known |= {*self._orphans.check(now)}
        self._shared_memory.check(now)

    def usage(self) -> dict[ProcessKey, ProcessUsage]:
        """Return what the ranks and all descendants of torchrun have used."""
        return read_usage(self.descendants() | self.ranks)

    def exit_codes(self, record: Path) -> dict[int, int]:
        """Return rank -> exit code of those that torchrun saw fail and that were not killed here."""
        return read_exit_codes(record, without=self.killed)

    def has_killed(self, pid: int) -> bool:
        """Return whether a process was killed here."""
        return pid in self._killed

    def add_rank(self, rank: int, pid: int) -> None:
        """Note the process of a rank, if it lives and is one of this launch: a script may write what it likes."""
        key = ProcessKey.of(pid)
        if key is not None and (has_mark(pid, self._mark) or key in self.descendants()):
            self._known.add(key)
            self._ranks[rank] = key

    def dead_ranks(self) -> set[int]:
        """Return the ranks whose process has ended."""
        return {rank for rank, key in self._ranks.items() if not key.alive}

    def descendants(self) -> set[ProcessKey]:
        """Return the living descendants of torchrun, and of ranks that were re-parented."""
        found: set[ProcessKey] = children_of(() if self._agent_key is None else (self._agent_key,))
        return found | children_of(self.ranks - found)

    def living(self) -> set[ProcessKey]:
        """Return torchrun, the ranks, and all their living descendants."""
        agent = set() if self._agent_key is None else {self._agent_key}
        return self.descendants() | self.ranks | agent

    def _descendants_and_ranks(self) -> set[ProcessKey]:
        found = self.descendants() | self.ranks
        self._known |= found
        return found

    def kill_ranks(self) -> None:
        """Kill everything but torchrun."""
        self._kill(self._descendants_and_ranks())

    def kill_all(self) -> None:
        """Kill all descendants of torchrun; ``sweep`` kills torchrun itself once there are none left.

        Until then it is stopped, so that it neither starts nor signals ranks and yet adopts what loses its parent.
        """
        if self._agent_key is not None:
            stop_processes({self._agent_key})
        below = {key for key in self._descendants_and_ranks() if key.alive}
        self._kill(below)
        if not below and self._agent_key is not None:
            self._kill({self._agent_key})

    def sweep(self) -> bool:
        """Kill the remaining processes, re-parented ones included; return whether none was left and torchrun is reaped.

        Called repeatedly, since a process may start another while it is killed.
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
        end_processes(agent)  # it is stopped, and would not hear that it is asked
        self._killed |= {key.pid for key in agent | self._ending.end(alive - agent)}
