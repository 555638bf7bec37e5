"""The processes of a launch on nodes, as their agents report them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from optuna_dsat.launch.facts import EndFacts
from optuna_dsat.launch.machine.host import ProcessUsage
from optuna_dsat.launch.places.place import HeldPlace
from optuna_dsat.launch.protocol import Conditions
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.events import Event

_OTHERS_S = 3.0
"""Time for torchrun to end on the other nodes after it failed on one."""
_NODE_BITS = 32
"""Process numbers of node N have N in the bits above these."""


class RemoteLaunch:
    """The processes of a launch on the nodes of an allocation (``Processes`` of ``launch/launch.py``)."""

    def __init__(self, launch_id: str, *, place: HeldPlace, nodes: int, slots: int) -> None:
        self.place = place
        self.pid = 0
        """Process number of torchrun on node 0; 0 before it has started."""
        self.ordered = False
        """Whether the nodes were told to start it."""
        self.forked: dict[int, bool] = {}
        """Number of a node -> whether its ranks are forked, for the nodes that have started."""
        self.command: tuple[str, ...] = ()
        """The command of node 0."""
        self.failure = ""
        """Why a node could not start its ranks; empty if all could."""
        self.trackers_dir: Path | None = None
        """Folder of the head for what trackers write; None before the nodes were told to start it."""
        self.is_lost = False
        """Whether the allocation is gone, which ends its processes."""
        self._launch_id = launch_id
        self._nodes = nodes
        self._slots = slots
        self._code: int | None = None
        self._killed = False
        self._ends: dict[int, int] = {}
        self._first_failure: tuple[float, int] | None = None
        """Monotonic time and exit code of the torchrun that failed first."""
        self._dead: dict[int, set[int]] = {}
        self._usage: dict[int, dict[ProcessKey, ProcessUsage]] = {}
        self._rank_keys: dict[int, set[ProcessKey]] = {}
        self._gone: dict[int, tuple[EndFacts, Conditions]] = {}
        self._free: dict[int, str] = {}

    @property
    def host(self) -> str:
        """Names of the nodes."""
        return ", ".join(self.place.node_names)

    @property
    def started(self) -> bool:
        """Whether all nodes have started their ranks."""
        return len(self.forked) == self._nodes

    @property
    def ranks(self) -> set[ProcessKey]:
        """The ranks among ``usage``."""
        return set().union(*self._rank_keys.values())

    @property
    def dead_ranks(self) -> set[int]:
        """Ranks whose process has ended."""
        return set().union(*self._dead.values())

    @property
    def conditions(self) -> Conditions:
        """Load on the node where other processes took the largest share of the cores."""
        reported = [conditions for _, conditions in self._gone.values()]
        return max(reported, key=lambda each: each.others_share or 0.0, default=Conditions())

    @property
    def code(self) -> int | None:
        """Exit code of torchrun once it has ended on all nodes, or some time after it failed on one."""
        if self._code is None and not self._killed:
            at, code = self._first_failure or (time.monotonic(), 0)
            if time.monotonic() - at > _OTHERS_S or len(self._ends) == self._nodes:
                self._code = code
        return self._code

    @property
    def end(self) -> EndFacts | None:
        """Facts of the end on all nodes; counts are None unless every node has reported them."""
        if not self._is_over:
            return None
        ends = [end for end, _ in self._gone.values()]
        kills = [end.oom_kills for end in ends if end.oom_kills is not None]
        free = [end.shared_memory_free for end in ends if end.shared_memory_free is not None]
        return EndFacts(
            exit_codes={rank: code for end in ends for rank, code in end.exit_codes.items()},
            agent_exit_code=self._code,
            oom_kills=sum(kills) if len(kills) == self._nodes else None,
            shared_memory_free=min(free, default=None),
        )

    @property
    def _is_over(self) -> bool:
        return self.is_lost or not self.ordered or len(self._gone) == self._nodes

    def note(self, node: int, news: Mapping[str, Any]) -> None:
        """Record an agent's message about the launch."""
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
            end = news["end"]
            codes = {int(rank): int(code) for rank, code in end["exit_codes"].items()}
            facts = EndFacts(**{**end, "exit_codes": codes})
            self._gone[node] = facts, Conditions.from_json(news["conditions"])
            self._note_end(node, facts.agent_exit_code)
        elif kind == "free":
            self._free[node] = str(news["note"])
        elif kind == "failed":
            self.failure = self.failure or str(news["why"])
            if node not in self.forked:  # ranks that were to measure another trial are yet to end
                self._gone[node] = EndFacts(oom_kills=0), Conditions()
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

    def advance(self, now: float, read: Callable[[float], list[Event]]) -> list[Event]:
        """Read the events: the nodes look at their own processes."""
        return read(now)

    def usage(self) -> dict[ProcessKey, ProcessUsage]:
        """Return the resources used by the processes of all nodes, as last reported."""
        return {key: use for usage in self._usage.values() for key, use in usage.items()}

    def ask_for_stacks(self) -> Collection[int]:
        """Have the ranks of all nodes write their stacks to their logs; return all ranks."""
        self.place.order({"do": "stacks", "launch_id": self._launch_id})
        return range(self._slots)

    def take_on(self, launch_id: str, order: Mapping[str, Any]) -> None:
        """Have the ranks, which wait for it, measure another trial."""
        self.place.order({"do": "continue", "launch_id": self._launch_id, **order})
        self._launch_id = self.place.launch_id = launch_id

    def leave(self) -> None:
        """Have ranks that wait for another trial leave."""
        self.place.order({"do": "dismiss", "launch_id": self._launch_id})

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
            self.place.order({"do": "end", "launch_id": self._launch_id, "ranks_only": ranks_only})

    def sweep(self) -> bool:
        """Have everything killed; return whether nothing is left on any node."""
        self.kill_all()
        return self._is_over

    def release(self, now: float) -> str | None:  # noqa: ARG002 - the nodes wait
        """Return the nodes' notes on devices that are not free; None while a node waits for its own."""
        if self.is_lost or not self.ordered:
            return ""
        return "".join(self._free.values()) if len(self._free) == self._nodes else None
