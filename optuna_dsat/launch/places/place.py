"""An allocation on the cluster, from request to release: its agents, missing nodes and rendezvous."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from optuna_dsat.launch.places.engine import ClusterError, Engine, News, Place, PlaceState
from optuna_dsat.launch.protocol import Rendezvous
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.agent.torchrun import LOOPBACK
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
        self._address = LOOPBACK
        self._interfaces: dict[int, str] = {}
        self._prepared_for: tuple[Preload, tuple[str, ...]] | None = None
        self._unprepared: set[int] = set()

    @property
    def node_names(self) -> tuple[str, ...]:
        """The cluster's names of the nodes, in node order, for each node whose agent has started."""
        return tuple(str(self._hellos[node]["name"]) for node in sorted(self._hellos))

    @property
    def nodes(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Name of each node, and its report of devices, files and versions."""
        return [(self.name_of(node), self._seen[node]) for node in sorted(self._seen)]

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
            self._reached[node] = [(str(address), str(own)) for address, own in message["doors"]]
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
        self._address = common[0]
        self._interfaces = {node: dict(result)[common[0]] for node, result in self._reached.items()}
        self._interfaces[0] = next((i for i, a in self._seen[0].get("interfaces", []) if a == common[0]), "")

    @property
    def address(self) -> str:
        """Address of node 0 as reached by the other nodes."""
        return self._address

    def rendezvous(self, node: int, port: int) -> Rendezvous | None:
        """Return the rendezvous of a node; None for a single-node allocation."""
        if self._layout.nodes == 1:
            return None
        return Rendezvous(
            nodes=self._layout.nodes,
            node_rank=node,
            address=self._address,
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
        own = [] if compiled else list(operators)
        self.order({"do": "prepare", "preload": preload.to_json(), "operators": own})
