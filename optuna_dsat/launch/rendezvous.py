"""Where the nodes of one launch meet; a launch on one machine needs none, since torchrun chooses a port of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Rendezvous"]


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The part of one node in a launch that spans several, or that runs on a node of a cluster alone."""

    nodes: int
    node_rank: int
    """Number of this node, from 0; its ranks follow those of the nodes before it."""
    address: str
    """Address of node 0, as the other nodes reach it."""
    port: int
    interface: str = ""
    """Network interface of this node on which the others are reached; empty for the libraries' own choice."""

    def to_json(self) -> dict[str, Any]:
        """Return the input of ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Rendezvous:
        """Build from the output of ``to_json``."""
        return cls(**record)
