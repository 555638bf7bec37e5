"""Nodes of a Ray cluster: select them by name, count suitable nodes and request placement groups."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from optuna_dsat.launch.places.engine import ClusterError
from optuna_dsat.words import things_in_words

_ID = "ray.io/node-id"
"""Label that Ray gives each node."""


def fitting_nodes(resources: Sequence[Mapping[str, float]], *, slots: int) -> int:
    """Return how many nodes with these total resources could hold a bundle of an allocation."""
    return sum(resource.get("CPU", 0) >= 1 and resource.get("GPU", 0) >= slots for resource in resources)


def named_nodes(alive: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the live nodes with these names, in the order of the names; all nodes if no names are given.

    A name is a node's name in Ray, its host name (with or without domain), its address, with or without the port of its
    raylet, or a name that resolves to its address.

    Raises:
        ClusterError: If no node has such a name.
    """
    if not names:
        return list(alive)
    result = []
    for name in names:
        records = [node for node in alive if name in _names_of(node)] or _at(_address(name), alive)
        if not records:
            shown = ", ".join(sorted(str(node["NodeName"]) for node in alive))
            raise ClusterError(f"No node of the Ray cluster is called {name} (--ray-node); its nodes: {shown}.")
        result.append(records[0])
    return result


def _names_of(node: Mapping[str, Any]) -> set[str]:
    host, address = str(node["NodeManagerHostname"]), str(node["NodeManagerAddress"])
    return {str(node["NodeName"]), host, host.partition(".")[0], address, f"{address}:{node['NodeManagerPort']}"}


def _address(name: str) -> str:
    with suppress(OSError, UnicodeError):
        return socket.gethostbyname(name)
    return ""


def _at(address: str, alive: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [node for node in alive if address and node["NodeManagerAddress"] == address]


def refuse_impossible(*, nodes: int, slots: int, names: Sequence[str] = ()) -> None:
    """Raise if this driver's cluster can never grant such an allocation.

    Raises:
        ClusterError: A single line with the cluster's resources.
    """
    chosen = named_nodes(_alive(), names)
    resources = [node["Resources"] for node in chosen]
    fitting = fitting_nodes(resources, slots=slots)
    if fitting >= nodes:
        return
    most = max((int(resource.get("GPU", 0)) for resource in resources), default=0)
    wanted = f"{nodes} node{'s' * (nodes > 1)} with " + (f"{things_in_words(slots, 'GPU')}" if slots else "a core")
    among = f"{things_in_words(len(chosen), 'node')}" + (" that --ray-node names" if names else "")
    raise ClusterError(
        f"A trial takes {wanted}{' each' * (nodes > 1)}, and the Ray cluster has {fitting} such among its {among}"
        + (f", of up to {things_in_words(most, 'GPU')}." if slots else ".")
    )


def group_of(*, nodes: int, slots: int, names: Sequence[str] = ()) -> Any:
    """Request a placement group with a bundle of ``slots`` GPUs per node; return it while pending.

    If exactly as many nodes are named as are needed, bundles are assigned to them in order, so that the first named
    node has the first ranks.

    Raises:
        ClusterError: If a named node does not exist.
    """
    from ray.util import placement_group

    labels = None
    if names:
        ids = [str(node["NodeID"]) for node in named_nodes(_alive(), names)]
        allowed = ids if len(ids) == nodes else [",".join(ids)] * nodes
        labels = [{_ID: f"in({item})"} for item in allowed]
    bundle = {"CPU": 1, "GPU": slots} if slots else {"CPU": 1}
    return placement_group([bundle] * nodes, strategy="STRICT_SPREAD", bundle_label_selector=labels)


def _alive() -> list[Mapping[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]
