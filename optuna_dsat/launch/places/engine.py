"""The interface between the launcher of a cluster and the engines that hold its places.

An engine asks a cluster's own scheduler for places, starts a ``NodeAgent`` (``launch/agent/agent.py``) on each node of
one, and carries orders to the agents and their news back. Both are JSON objects, whose meaning no engine knows, apart
from ``ping_order``. Nodes of a place are numbered from 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from optuna_dsat.errors import DsatError

__all__ = [
    "LOST_S",
    "PING_S",
    "ClusterError",
    "Engine",
    "News",
    "Order",
    "Place",
    "PlaceState",
    "ping_order",
]

PING_S = 2.0
"""Time between two pings of an agent."""
LOST_S = 20.0
"""Silence of a node after which its place is lost."""

Order = Mapping[str, Any]
"""What an agent is told, as JSON: ``do`` names it."""


def ping_order() -> Order:
    """Return the order that an engine itself gives, every ``PING_S``, whether or not anybody asks for news.

    An agent answers it with its own time, so an engine that hears nothing of a node for ``LOST_S`` knows its place to
    be lost, and the head learns by how much the node's clock is ahead.
    """
    return {"do": "ping", "sent": time.time()}


class ClusterError(DsatError):
    """A cluster refuses what is asked of it, or cannot be used; nothing was launched."""

    exit_code = 2


class PlaceState(StrEnum):
    """State of a place."""

    QUEUED = "queued"
    """The scheduler has not granted it, or not all of its agents have spoken."""
    READY = "ready"
    """Every node has an agent that has spoken."""
    LOST = "lost"
    """At least one node is gone or silent, or the place was refused. It does not come back."""


class Place(Protocol):
    """N nodes with K slots each, held for launches until they are released."""

    @property
    def name(self) -> str:
        """Its name for the user, such as ``SLURM job 17``."""
        ...

    @property
    def state(self) -> PlaceState:
        """What it is now; a lost place never becomes another."""
        ...

    @property
    def why(self) -> str:
        """Why it is queued, in the scheduler's own words, or why it is lost; empty if that is not known."""
        ...


@dataclass(frozen=True, kw_only=True)
class News:
    """What an agent says."""

    place: Place
    node: int
    """Number of the node in the place, from 0."""
    message: Mapping[str, Any]
    """Parsed JSON; ``news`` names it."""
    time: float
    """Unix time at which it arrived at the head."""


class Engine(Protocol):
    """Holds places. All methods are called from one thread; an engine may use others of its own.

    An engine keeps its places alive by itself: it pings the agents of those that are ready (see ``ping_order``), reads
    what they say, and loses a place of which a node is silent for ``LOST_S``. A place that is lost or released leaves
    no process behind: its agents end their launches once they hear nothing more.
    """

    def check(self, *, nodes: int, slots: int) -> None:
        """Refuse, within five seconds, what the cluster can never grant.

        Args:
            nodes: Nodes of a place.
            slots: GPUs of a node; 0 for none.

        Raises:
            ClusterError: In one line with the cluster's own reason.
        """
        ...

    def request(self, *, nodes: int, slots: int) -> Place:
        """Ask for a place; does not wait for it. It is ready once ``news`` has returned a ``hello`` of every node.

        Args:
            nodes: Nodes of the place.
            slots: GPUs of a node; 0 for none.
        """
        ...

    def order(self, place: Place, order: Order, *, node: int | None = None) -> None:
        """Send an order to one node of a place, to all for None. Never waits; a lost place takes it for nothing."""
        ...

    def news(self, timeout_s: float) -> Sequence[News]:
        """Return what agents said since the last call, in each node's own order; wait up to ``timeout_s`` for some.

        It returns early also when a place changes its state.
        """
        ...

    def release(self, place: Place) -> None:
        """Give a place back, a queued one too; does not wait."""
        ...

    def close(self) -> None:
        """Give back all places and wait, a few seconds at most, until they are gone."""
        ...
