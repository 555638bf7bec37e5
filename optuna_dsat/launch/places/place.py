"""An allocation on the cluster, from request to release, and the processes of a launch on its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from optuna_dsat.launch.machine.host import ProcessUsage
from optuna_dsat.launch.places.engine import ClusterError, Engine, News, Place, PlaceState
from optuna_dsat.launch.protocol import Conditions, EndFacts, Rendezvous
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.agent.torchrun import LOOPBACK
from optuna_dsat.runtime.events import Event
from optuna_dsat.version import __version__

_LEAST_OFFSET_S = 0.001
"""Clock offsets below this are not corrected: a round trip cannot measure them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape shared by all allocations of a study."""

    nodes: int
    slots: int
    """Ranks per node."""
    kind: str
    """``cuda`` or ``cpu``."""
    gpus: int
    """GPUs per node to request from the cluster; 0 for none."""
    python: str | None = None
    """Interpreter of the ranks on each node; None for the agent's."""

    @property
    def ranks(self) -> int:
        """Ranks of a launch."""
        return self.nodes * self.slots


class Stage(Enum):
    """State of an allocation."""

    QUEUED = "queued"
    LOOKING = "looking"
    """The nodes check their devices and files."""
    REACHING = "reaching"
    """The nodes try to connect to node 0."""
    USABLE = "usable"
    LOST = "lost"


class HeldPlace:
    """An allocation and the messages received from its nodes."""

    def __init__(self, engine: Engine, layout: Layout, *, files: Mapping[str, str]) -> None:
        self._engine = engine
        self._layout = layout
        self._files = files
        self.place: Place = engine.request(nodes=layout.nodes, slots=layout.gpus)
        self.stage = Stage.QUEUED
        self.launch_id: str | None = None
        """The running launch; None while idle."""
        self.asked_at = time.monotonic()
        self.idle_since: float | None = None
        """When it was first found to have nothing to launch; None while it has work."""
        self.told_reason: str | None = None
        """The queue reason most recently shown to the user."""
        self._hellos: dict[int, Mapping[str, Any]] = {}
        self._seen: dict[int, Mapping[str, Any]] = {}
        self._reached: dict[int, list[tuple[str, str]]] = {}
        self._phases: dict[int, str] = {}
        """Node number -> slow activity there; empty for none."""
        self._offsets: dict[int, tuple[float, float]] = {}
        """Node number -> shortest round trip, and the clock offset (node minus head) measured with it."""
        self.address = LOOPBACK
        """Address of node 0 as reached by the other nodes."""
        self._interfaces: dict[int, str] = {}
        self._prepared_for: tuple[Preload, tuple[str, ...]] | None = None
        self._unprepared: set[int] = set()

    @property
    def node_names(self) -> tuple[str, ...]:
        """The cluster's names of the nodes, in node order, for each node whose agent has started."""
        return tuple(str(self._hellos[node]["name"]) for node in sorted(self._hellos))

    @property
    def is_idle(self) -> bool:
        """Whether a launch can start now."""
        return self.stage is Stage.USABLE and self.launch_id is None and not self._unprepared

    @property
    def phase(self) -> str:
        """Slow activity to report; empty for none. Queue reasons are reported elsewhere."""
        if self.stage is Stage.QUEUED:
            missing = self._layout.nodes - len(self._hellos)
            return "" if self.place.why else f"waiting for {missing} node{'s' * (missing > 1)}"
        if self.stage in (Stage.LOOKING, Stage.REACHING):
            return f"looking at {', '.join(self.node_names)}"
        words = next(filter(None, self._phases.values()), "")
        return f"{words}, on the cluster" if words else ""

    def name_of(self, node: int) -> str:
        """Return the cluster's name of a node."""
        return str(self._hellos[node]["name"]) if node in self._hellos else f"node {node}"

    def order(self, order: Mapping[str, Any], *, node: int | None = None) -> None:
        """Send a command to a node, or to all nodes for None."""
        self._engine.order(self.place, order, node=node)

    def release(self) -> None:
        """Release the allocation."""
        self._engine.release(self.place)

    def note(self, news: News) -> None:
        """Record a message about the allocation rather than about a launch."""
        message, node = news.message, news.node
        kind = message["news"]
        if kind == "hello":
            self._hellos[node] = message
        elif kind == "pong" and isinstance(message.get("sent"), float):
            trip_s = news.time - message["sent"]
            offset_s = message["time"] - (news.time + message["sent"]) / 2
            self._offsets[node] = min(self._offsets.get(node, (trip_s, offset_s)), (trip_s, offset_s))
        elif kind == "seen":
            self._seen[node] = message
        elif kind == "reached":
            self._reached[node] = [(str(address), str(token)) for address, token in message["doors"]]
        elif kind == "phase":
            self._phases[node] = str(message["words"])
        elif kind == "prepared":
            self._unprepared.discard(node)

    def clock_ahead_s(self, node: int) -> float:
        """Return how far a node's clock is ahead of the head's, in seconds; 0 if less than a round trip can resolve."""
        trip_s, offset_s = self._offsets.get(node, (0.0, 0.0))
        return offset_s if abs(offset_s) > max(trip_s / 2, _LEAST_OFFSET_S) else 0.0

    def advance(self) -> None:
        """Advance to the next stage when the nodes have answered.

        Raises:
            ClusterError: If a node lacks a requirement of every launch of the study; names the node.
        """
        if self.place.state is PlaceState.LOST:
            self.stage = Stage.LOST
        elif self.stage is Stage.QUEUED and len(self._hellos) == self._layout.nodes:
            self._check_versions()
            for node in self._hellos:
                order = {
                    "do": "look",
                    "kind": self._layout.kind,
                    "slots": self._layout.slots,
                    "files": self._files,
                    "python": self._layout.python,
                }
                self.order({**order, "listen": node == 0 and not self._is_one_machine}, node=node)
            self.stage = Stage.LOOKING
        elif self.stage is Stage.LOOKING and len(self._seen) == self._layout.nodes:
            self._check_seen()
            if self._is_one_machine:
                self.stage = Stage.USABLE
                return
            for node in range(1, self._layout.nodes):
                self.order({"do": "reach", "doors": self._seen[0]["doors"]}, node=node)
            self.stage = Stage.REACHING
        elif self.stage is Stage.REACHING and len(self._reached) == self._layout.nodes - 1:
            self._choose_address()
            self.stage = Stage.USABLE

    @property
    def _is_one_machine(self) -> bool:
        """Whether all nodes share a loopback address, as a single node always does."""
        return len({hello["machine"] for hello in self._hellos.values()}) == 1

    def _check_versions(self) -> None:
        for node, hello in self._hellos.items():
            if hello["version"] != __version__:
                raise ClusterError(
                    f"{self.name_of(node)} has optuna-dsat {hello['version']}, this machine {__version__}. "
                    "Install the same on all."
                )

    def _check_seen(self) -> None:
        for node, seen in sorted(self._seen.items()):
            if seen["why"]:
                raise ClusterError(
                    f"{self.name_of(node)} cannot run the study: {seen['why']}. Script, config and working directory "
                    "must be on every node under the same paths (docs/how-to/clusters.md)."
                )
        first = self._seen[0]["versions"]
        for node, seen in self._seen.items():
            if unlike := [name for name in first if seen["versions"].get(name) != first[name]]:
                raise ClusterError(
                    f"The nodes differ in {unlike[0]}: {self.name_of(0)} has {first[unlike[0]]}, "
                    f"{self.name_of(node)} has {seen['versions'].get(unlike[0], 'none')}. Install the same on all."
                )

    def _choose_address(self) -> None:
        """Choose the first address of node 0 that all other nodes reached, and record their interfaces.

        Raises:
            ClusterError: If there is none; names the node that reached the fewest.
        """
        doors = [str(address) for address, _ in self._seen[0]["doors"]]
        common = [a for a in doors if all(a in dict(result) for result in self._reached.values())]
        if not common:
            worst = min(self._reached, key=lambda node: len(self._reached[node]))
            shown = ", ".join(doors) or "none"
            raise ClusterError(f"{self.name_of(worst)} reaches no address of {self.name_of(0)} (tried: {shown}).")
        self.address = common[0]
        self._interfaces = {node: dict(result)[common[0]] for node, result in self._reached.items()}
        self._interfaces[0] = next((i for i, a in self._seen[0].get("interfaces", []) if a == common[0]), "")

    def rendezvous(self, node: int, port: int) -> Rendezvous | None:
        """Return the rendezvous of a node; None for a single-node allocation."""
        if self._layout.nodes == 1:
            return None
        return Rendezvous(
            nodes=self._layout.nodes,
            node_rank=node,
            address=self.address,
            port=port,
            interface=self._interfaces.get(node, ""),
        )

    def prepare(self, preload: Preload, operators: Sequence[str]) -> None:
        """Have all nodes import and compile the requirements of launches, unless already requested."""
        wanted = (preload, tuple(operators))
        if self.stage is not Stage.USABLE or wanted == self._prepared_for:
            return
        compiled = self._prepared_for is not None and self._prepared_for[1] == wanted[1]
        self._prepared_for = wanted
        self._unprepared = set(range(self._layout.nodes))
        names = [] if compiled else list(operators)
        self.order({"do": "prepare", "preload": preload.to_json(), "operators": names})


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
        self._conditions: dict[int, Conditions] = {}
        self._gone: dict[int, EndFacts] = {}
        self._free: dict[int, str] = {}

    @property
    def host(self) -> str:
        """Names of the nodes."""
        return ", ".join(self.place.node_names)

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
        """Load on the node where other processes took the largest share of the cores, and the power of all nodes."""
        reported = self._conditions.values()
        loaded = max(reported, key=lambda each: each.others_share or 0.0, default=Conditions())
        powers = [each.power_w for each in reported if each.power_w is not None]
        return replace(loaded, power_w=sum(powers) if len(powers) == self._nodes else None)

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
        ends = self._gone.values()
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
        elif kind == "conditions":
            self._conditions[node] = Conditions.from_json(news["conditions"])
        elif kind == "gone":
            end = news["end"]
            codes = {int(rank): int(code) for rank, code in end["exit_codes"].items()}
            facts = EndFacts(**{**end, "exit_codes": codes})
            self._gone[node] = facts
            self._note_end(node, facts.agent_exit_code)
        elif kind == "free":
            self._free[node] = str(news["note"])
        elif kind == "failed":
            self.failure = self.failure or str(news["why"])
            if node not in self.forked:  # ranks that were to measure another trial are yet to end
                self._gone[node] = EndFacts(oom_kills=0)
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
        self._conditions = {}

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
