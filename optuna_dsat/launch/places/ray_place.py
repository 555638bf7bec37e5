"""A place in a Ray cluster: a placement group with one bundle a node, and in each an actor that holds an agent."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from optuna_dsat.launch.agent.wire import Joiner
from optuna_dsat.launch.places.engine import LOST_S, PING_S, ClusterError, News, Order, PlaceState, ping_order
from optuna_dsat.launch.places.ray_node import NodeRelay
from optuna_dsat.launch.places.ray_nodes import group_of
from optuna_dsat.launch.places.slurm import agent_environment

__all__ = ["RayPlace", "cause_of", "relay_on"]

_WAIT_S = 0.05
"""Longest wait of a node for its agent to say something, in one exchange."""
_BEGIN_S = 120.0
"""Longest wait for the first word of an agent, whose node may have to import torch from a slow disk."""
_GOODBYE_S = 8.0
"""Longest wait for agents to end before their actors are killed."""
_AVOIDED_S = 120.0
"""Time for which a node with which a place was lost is left alone, if there are others: Ray itself takes about a minute
to miss one that stands still."""
_ASK_S = 1.0
"""Time between two questions to Ray why a place is queued."""


def relay_on(group: Any, index: int, *, gpus: int) -> Any:
    """Return a new actor in a bundle of a placement group, of which it takes all, that holds a process there."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    limits = {"max_restarts": 0, "max_concurrency": 1, "scheduling_strategy": where}
    return ray.remote(NodeRelay).options(num_cpus=1, num_gpus=gpus, **limits).remote()


_WHY = {
    "NO_RESOURCES": "no resources: what it takes is held by others",
    "FAILED_TO_COMMIT_RESOURCES": "no resources: a node was taken or lost meanwhile",
    "INFEASIBLE": "infeasible: too few nodes of the cluster that live could hold it",
}
"""What Ray says of a placement group that is pending -> the same for a user."""
_ERROR = re.compile(r"[A-Za-z_.]+(Error|Exception): ")
"""Beginning of a line that says what was raised."""


class _Phase(Enum):
    """What happens to a place next."""

    PENDING = "the placement group is pending"
    TALKING = "agents are started or talked to"
    LEAVING = "agents are told to end"
    GONE = "nothing of it is left"


@dataclass(kw_only=True)
class _Node:
    """One node of a place."""

    id: str
    """Its number in Ray; empty if it is not known."""
    name: str
    actor: Any
    asked: Any
    """Reference of the call that is under way; None for none."""
    heard_at: float
    """When its agent was heard last, on the monotonic clock."""
    spoke: bool = False
    orders: list[bytes] = field(default_factory=list)
    """Lines for its agent that are not on their way yet."""
    joiner: Joiner = field(default_factory=Joiner)


class RayPlace:
    """A place. All methods but the properties are called from the engine's own thread.

    Args:
        nodes: Nodes.
        slots: GPUs of each; 0 for none.
        number: Counts the places of the engine, from 1.
        names: Nodes that may be used; all for none.
        suspects: Number in Ray of a node with which a place was lost -> when, on the monotonic clock; is filled.
    """

    def __init__(
        self,
        *,
        nodes: int,
        slots: int,
        number: int,
        names: Sequence[str] = (),
        suspects: dict[str, float] | None = None,
    ) -> None:
        self._slots = slots
        self._names = names
        self._suspects = {} if suspects is None else suspects
        self._count = nodes
        self._number = number
        self._group: Any = None
        self._granted: Any = None
        self._nodes: list[_Node] = []
        self._phase = _Phase.PENDING
        self._state = PlaceState.QUEUED
        self._why = ""
        self._pinged_at = self._asked_at = self._left_at = 0.0
        self._goodbyes: list[Any] = []

    @property
    def name(self) -> str:
        """Its name for the user."""
        return f"Ray placement group {self._number}"

    @property
    def state(self) -> PlaceState:
        """What it is now."""
        return self._state

    @property
    def why(self) -> str:
        """Why it is queued, in Ray's own words, or why it is lost."""
        return self._why

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left."""
        return self._phase is _Phase.GONE

    def references(self) -> list[Any]:
        """Return what is waited for, of Ray's references."""
        if self._phase is _Phase.PENDING:
            return [self._granted] if self._granted is not None else []
        if self._phase is _Phase.LEAVING:
            return list(self._goodbyes)
        return [node.asked for node in self._nodes if node.asked is not None]

    def give(self, order: Order, *, node: int | None) -> None:
        """Note an order for one node or all; a place that is lost or released takes it for nothing."""
        if self._phase in (_Phase.LEAVING, _Phase.GONE):
            return
        line = json.dumps(order).encode("ascii") + b"\n"
        for index, one in enumerate(self._nodes):
            if node in (None, index):
                one.orders.append(line)

    def advance(self, ready: Sequence[Any]) -> Iterator[News]:
        """Go on with what has come; yield what agents said.

        Args:
            ready: Those of ``references`` that Ray has an answer to.
        """
        now = time.monotonic()
        if self._phase is _Phase.PENDING:
            self._ask_for_it(ready, now)
        elif self._phase is _Phase.TALKING:
            yield from self._talk(ready, now)
        elif self._phase is _Phase.LEAVING:
            self._goodbyes = [one for one in self._goodbyes if one not in ready]
            if not self._goodbyes or now - self._left_at > _GOODBYE_S:
                self._remove()

    def leave(self, why: str = "") -> None:
        """End the agents and give the nodes back; lose the place with a reason, or release it."""
        if self._phase in (_Phase.LEAVING, _Phase.GONE):
            return
        self._why = why
        self._state = PlaceState.LOST
        self._left_at = time.monotonic()
        self._goodbyes = [node.actor.close.remote() for node in self._nodes]
        self._phase = _Phase.LEAVING

    def give_up(self, why: str) -> None:
        """Lose the place without a word to Ray, which does not answer."""
        self._state, self._why, self._phase = PlaceState.LOST, why, _Phase.GONE

    def _ask_for_it(self, ready: Sequence[Any], now: float) -> None:
        """Ask Ray for the nodes, then why they are not there, then start an agent on each."""
        from ray.util import placement_group_table

        if self._group is None:
            without = [one for one, since in self._suspects.items() if now - since < _AVOIDED_S]
            try:
                self._group = group_of(nodes=self._count, slots=self._slots, names=self._names, without=without)
            except ClusterError as error:
                return self.leave(str(error).rstrip("."))
            self._granted = self._group.ready()
        elif self._granted in ready:
            self._start(placement_group_table(self._group), now)
        elif now - self._asked_at > _ASK_S:
            self._asked_at = now
            state = str(placement_group_table(self._group).get("stats", {}).get("scheduling_state", ""))
            self._why = _WHY.get(state, state.lower().replace("_", " "))
        return None

    def _start(self, table: Mapping[str, Any], now: float) -> None:
        import ray

        known = {node["NodeID"]: node for node in ray.nodes()}
        where = [known.get(table["bundles_to_node_id"][index], {}) for index in range(self._count)]
        names = [str(node.get("NodeName") or node.get("NodeManagerAddress") or "a node") for node in where]
        if len(set(names)) < len(names):
            names = [f"{name}:{node.get('NodeManagerPort')}" for name, node in zip(names, where, strict=True)]
        for index, name in enumerate(names):
            actor = relay_on(self._group, index, gpus=self._slots)
            words = ["-P", "-m", "optuna_dsat.launch.places.node_agent", str(index), name]
            asked = actor.start.remote(words, agent_environment(os.environ), str(Path.cwd()))
            node_id = str(where[index].get("NodeID", ""))
            self._nodes.append(_Node(id=node_id, name=name, actor=actor, asked=asked, heard_at=now))
        self._why = "its agents start"
        self._phase = _Phase.TALKING

    def _talk(self, ready: Sequence[Any], now: float) -> Iterator[News]:
        """Take what nodes answered, and call each again."""
        if now - self._pinged_at > PING_S:
            self._pinged_at = now
            self.give(ping_order(), node=None)
        for index, node in enumerate(self._nodes):
            if node.asked in ready:
                yield from self._answer(index, node, now)
            if self._phase is not _Phase.TALKING:
                return
            silent_s = now - node.heard_at
            if silent_s > (LOST_S if node.spoke else _BEGIN_S):
                return self._lose(node, f"{node.name} said nothing for {silent_s:.0f} s")
        if self._state is PlaceState.QUEUED and all(node.spoke for node in self._nodes):
            self._state, self._why = PlaceState.READY, ""
        return None

    def _answer(self, index: int, node: _Node, now: float) -> Iterator[News]:
        """Yield what a node answered, and call it again; lose the place if it cannot answer."""
        import ray

        try:
            answer = ray.get(node.asked)
        except ray.exceptions.RayError as error:
            gone = node.spoke and isinstance(error, ray.exceptions.RayActorError)
            why = f"Ray's actor on {node.name} is gone" if gone else f"{node.name}: {cause_of(error)}"
            return self._lose(node, why)
        said, ended = answer or (b"", None)
        arrived = time.time()
        if said:
            node.heard_at, node.spoke = now, True
        for _, message in node.joiner.feed(said):
            yield News(place=self, node=index, message=message, time=arrived)
        if ended is not None and not said:
            return self._lose(node, f"the agent on {node.name} ended with {ended}")
        orders, node.orders = b"".join(node.orders), []
        node.asked = node.actor.exchange.remote(orders, _WAIT_S)
        return None

    def _lose(self, node: _Node, why: str) -> None:
        """Lose the place because of one of its nodes, which the next places leave alone for a while."""
        self._suspects[node.id] = time.monotonic()
        self.leave(why)

    def _remove(self) -> None:
        """Kill what did not end, and give the nodes back."""
        import ray
        from ray.util import remove_placement_group

        for node in self._nodes:
            ray.kill(node.actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._nodes, self._goodbyes = [], []
        self._phase = _Phase.GONE


def cause_of(error: BaseException) -> str:
    """Return what an error of Ray's says, in one line: the last error that it names, which is that of the node."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.match(line)]
    return (named or lines[:1] or [type(error).__name__])[-1]
