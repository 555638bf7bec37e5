"""The interface between the cluster launcher and the engines that hold its allocations.

An engine requests allocations from the cluster's scheduler and starts a ``NodeAgent`` (``launch/agent/agent.py``) on
each node. It passes commands to the agents and returns their messages. Both are JSON objects that engines do not
interpret, apart from ``ping_order``. Nodes of an allocation are numbered from 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from optuna_dsat.errors import DsatError

PING_S = 2.0
"""Interval between pings of an agent."""
LOST_S = 20.0
"""Silence of a node after which its allocation is lost."""

Order = Mapping[str, Any]
"""Command to an agent, as JSON; its name is in ``do``."""


def ping_order() -> Order:
    """Return the ping that an engine sends every ``PING_S``, even if ``news`` is not called.

    From an agent's reply the head computes the clock offset; a node silent for ``LOST_S`` loses the allocation.
    """
    return {"do": "ping", "sent": time.time()}


class ClusterError(DsatError):
    """The cluster rejects a request or cannot be used. Nothing was launched."""

    exit_code = 2


class PlaceState(StrEnum):
    """State of an allocation."""

    QUEUED = "queued"
    """Not granted yet, or some agents have not answered."""
    READY = "ready"
    """The agents of all nodes have answered."""
    LOST = "lost"
    """A node is gone or silent, or the request was refused. This state is final."""


class Place(Protocol):
    """N nodes with K slots each, held for launches until released."""

    @property
    def name(self) -> str:
        """Name for the user, such as ``SLURM job 17``."""

    @property
    def state(self) -> PlaceState:
        """Current state; ``LOST`` is final."""

    @property
    def why(self) -> str:
        """Why it is queued, as the scheduler reports it, or why it is lost; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class News:
    """A message from an agent."""

    place: Place
    node: int
    """Number of the node in the allocation, from 0."""
    message: Mapping[str, Any]
    """Parsed JSON; the kind of message is in ``news``."""
    time: float
    """Unix time of arrival at the head."""


class Engine(Protocol):
    """Holds allocations. All methods are called from a single thread; an engine may run further threads internally.

    An engine pings the agents of ready allocations (see ``ping_order``) and reads their messages. Lost or released
    allocations leave no processes behind: without pings, the agents end their launches.
    """

    def check(self, *, nodes: int, slots: int) -> None:
        """Raise within five seconds if the cluster can never grant such an allocation.

        ``slots`` are GPUs per node; 0 for none.

        Raises:
            ClusterError: A single line with the cluster's reason.
        """

    def request(self, *, nodes: int, slots: int) -> Place:
        """Request an allocation without waiting. It is ready once ``news`` has returned a ``hello`` of every node."""

    def order(self, place: Place, order: Order, *, node: int | None = None) -> None:
        """Send a command to a node, or to all nodes for None. Never waits; lost allocations ignore it."""

    def news(self, timeout_s: float) -> Sequence[News]:
        """Return messages of agents, in order per node; wait up to ``timeout_s`` for some, or for a change of state."""

    def release(self, place: Place) -> None:
        """Release an allocation, including a queued request, without waiting."""

    def close(self) -> None:
        """Release all allocations and wait, a few seconds at most, until they are gone."""
