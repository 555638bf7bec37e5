"""One launch as the head sees it: what the agents of its nodes say of its processes, and what they are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optuna_dsat.launch.machine.host import ProcessUsage
from optuna_dsat.launch.machine.processes import ProcessKey
from optuna_dsat.launch.protocol import Conditions

__all__ = ["RemoteLaunch"]

_OTHERS_S = 3.0
"""Time for the other nodes' torchrun to end by themselves, after one has failed."""
_NODE_BITS = 32
"""Process numbers of node N are told apart from those of others by N in the bits above these."""


class RemoteLaunch:
    """The processes of a launch on the nodes of a place (an ``AgentHandle`` and its ``LaunchProcesses``).

    Args:
        launch_id: The launch.
        nodes: Nodes of the place.
        send: Sends an order to all of them.
    """

    def __init__(self, launch_id: str, *, nodes: int, send: Callable[[Mapping[str, Any]], None]) -> None:
        self.pid = 0
        """Process number of torchrun on node 0; 0 before it has started."""
        self.returncode: int | None = None
        self.ordered = False
        """Whether the nodes were told to start it."""
        self.forked: dict[int, bool] = {}
        """Number of a node -> whether its ranks are forked, for the nodes that have started."""
        self.command: tuple[str, ...] = ()
        """The command of node 0."""
        self.failure = ""
        """Why a node could not start its ranks; empty if all could."""
        self._launch_id = launch_id
        self._nodes = nodes
        self._send = send
        self._is_lost = False
        self._killed = False
        self._ends: dict[int, int] = {}
        self._first_failure: tuple[float, int] | None = None
        """Monotonic time and exit code of the torchrun that failed first."""
        self._dead: dict[int, set[int]] = {}
        self._usage: dict[int, dict[ProcessKey, ProcessUsage]] = {}
        self._rank_keys: dict[int, set[ProcessKey]] = {}
        self._gone: dict[int, Mapping[str, Any]] = {}
        self._free: dict[int, str] = {}

    @property
    def started(self) -> bool:
        """Whether all nodes have started their ranks."""
        return len(self.forked) == self._nodes

    @property
    def known(self) -> frozenset[ProcessKey]:
        """Nothing: devices are looked at on the nodes."""
        return frozenset()

    @property
    def ranks(self) -> set[ProcessKey]:
        """The ranks among ``usage``."""
        return set().union(*self._rank_keys.values())

    @property
    def shared_memory(self) -> frozenset[Path]:
        """Nothing: what lies on a node is removed there."""
        return frozenset()

    def look(self, now: float) -> None:
        """Do nothing: each node looks at its own."""

    @property
    def conditions(self) -> Conditions:
        """What went on beside it on the node where others took the largest share of the cores."""
        told = [Conditions.from_json(one["conditions"]) for one in self._gone.values()]
        return max(told, key=lambda one: one.others_share or 0.0, default=Conditions())

    @property
    def oom_kills(self) -> int | None:
        """Processes that the kernels of all nodes killed for want of memory meanwhile; None if unknown."""
        counts = [one["oom_kills"] for one in self._gone.values()]
        return None if len(counts) < self._nodes or None in counts else sum(counts)

    @property
    def free_note(self) -> str | None:
        """What is to be said of devices that are not free; None while a node still waits for its own."""
        if self._is_lost or not self.ordered:
            return ""
        return "".join(self._free.values()) if len(self._free) == self._nodes else None

    def note(self, node: int, news: Mapping[str, Any]) -> None:
        """Take what an agent says of the launch."""
        kind = news["news"]
        if kind == "started":
            self.forked[node] = bool(news["forked"])
            if node == 0:
                self.pid, self.command = int(news["pid"]), tuple(news["command"])
        elif kind == "state":
            self._dead[node] = set(news["dead"])
            self._note_end(node, news["agent"])
        elif kind == "usage":
            self._note_usage(node, news["usage"])
        elif kind == "gone":
            self._gone[node] = news
            self._note_end(node, news["agent"])
        elif kind == "free":
            self._free[node] = str(news["note"])
        elif kind == "failed":
            self.failure = self.failure or str(news["why"])
            self._gone[node] = {"exit_codes": {}, "oom_kills": 0, "agent": None, "conditions": {}}
            self._free[node] = ""

    def _note_end(self, node: int, code: int | None) -> None:
        if code is None:
            return
        self._ends[node] = code
        if code and self._first_failure is None:
            self._first_failure = time.monotonic(), code

    def _note_usage(self, node: int, rows: list[list[Any]]) -> None:
        keys = [ProcessKey((node << _NODE_BITS) | int(row[0]), int(row[1])) for row in rows]
        self._rank_keys[node] = {key for key, row in zip(keys, rows, strict=True) if row[2]}
        self._usage[node] = {
            key: ProcessUsage(cpu_s=row[3], ended_cpu_s=row[4], io_bytes=int(row[5]))
            for key, row in zip(keys, rows, strict=True)
        }

    def lose(self) -> None:
        """Note that the place is gone: what ran there ends by itself."""
        self._is_lost = True

    def poll(self) -> int | None:
        """Return torchrun's exit code once it has ended on all nodes, or some time after it failed on one."""
        if self.returncode is None:
            at, code = self._first_failure or (time.monotonic(), 0)
            if time.monotonic() - at > _OTHERS_S or len(self._ends) == self._nodes:
                self.returncode = code
        return self.returncode

    def wait(self) -> int:
        """Return the exit code; nothing is waited for here."""
        return self.returncode or 0

    def add_rank(self, rank: int, pid: int) -> None:
        """Do nothing: nodes know their ranks."""

    def dead_ranks(self) -> set[int]:
        """Return the ranks whose process has ended."""
        return set().union(*self._dead.values())

    def living(self) -> set[ProcessKey]:
        """Return nothing: nodes know their processes."""
        return set()

    def usage(self) -> dict[ProcessKey, ProcessUsage]:
        """Return what the processes of all nodes have used, as told last."""
        return {key: use for one in self._usage.values() for key, use in one.items()}

    def exit_codes(self, record: Path) -> dict[int, int]:  # noqa: ARG002 - the nodes have read theirs
        """Return rank -> exit code, as the nodes told when their processes were gone."""
        return {int(rank): int(code) for one in self._gone.values() for rank, code in one["exit_codes"].items()}

    def has_killed(self, pid: int) -> bool:  # noqa: ARG002 - all or nothing
        """Return whether it was ended by order of the head."""
        return self._killed

    def kill_ranks(self) -> None:
        """Have everything but torchrun killed."""
        self._order_end(ranks_only=True)

    def kill_all(self) -> None:
        """Have everything killed."""
        if not self._killed:
            self._killed = True
            self._order_end(ranks_only=False)

    def _order_end(self, *, ranks_only: bool) -> None:
        if self.ordered:
            self._send({"do": "end", "launch_id": self._launch_id, "ranks_only": ranks_only})

    def sweep(self) -> bool:
        """Have everything killed; return whether nothing is left on any node."""
        self.kill_all()
        return self._is_lost or not self.ordered or len(self._gone) == self._nodes
