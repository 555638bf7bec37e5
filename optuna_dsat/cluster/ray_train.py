"""``python -m optuna_dsat.cluster.ray_train --nodes N --ranks K -- SCRIPT ...``: torchrun on nodes of a Ray cluster.

What a search on Ray prints to train with: the nodes are asked for as those of its trials were, and each runs torchrun
with this process's environment. Their output comes here; the exit code is that of the first that fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from optuna_dsat.cluster.engine import ClusterError
from optuna_dsat.cluster.ray_engine import address_of, join_cluster, refuse_impossible
from optuna_dsat.cluster.ray_place import bundle_of, relay_on
from optuna_dsat.cluster.srun import agent_environment

__all__ = ["main", "torchrun_words"]

_WAIT_S = 0.5
_WORD_S = 10.0
"""Time between two lines on nodes that are waited for."""
_END_S = 10.0
"""Longest wait for all nodes to end."""


def main(argv: Sequence[str]) -> int:
    """Train; return the exit code."""
    parser = argparse.ArgumentParser(prog="ray_train")
    parser.add_argument("--address")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, required=True, help="Ranks of a node.")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a node.")
    parser.add_argument("words", nargs="+", help="The script, or -m and a module, with arguments, after --.")
    given = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        join_cluster(address_of(given.address))
        refuse_impossible(nodes=given.nodes, slots=given.gpus)
    except ClusterError as error:
        sys.stderr.write(f"optuna-dsat: {error}\n")
        return error.exit_code
    return _train(given)


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def torchrun_words(words: Sequence[str], *, nodes: int, node: int, ranks: int, address: str, port: int) -> list[str]:
    """Return what Python runs on one node.

    Args:
        words: The script, or ``-m`` and a module, with arguments.
        nodes: Nodes in all.
        node: Number of this one, from 0.
        ranks: Ranks of a node.
        address: Address of node 0.
        port: Port that is free there.
    """
    where = ["--rdzv_backend", "static", "--master_addr", address, "--master_port", str(port)]
    shape = ["--nnodes", str(nodes), "--node_rank", str(node), "--nproc_per_node", str(ranks)]
    return ["-m", "torch.distributed.run", *shape, *where, *words]


def _train(given: argparse.Namespace) -> int:
    """Hold the nodes and run torchrun on each."""
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group([bundle_of(given.gpus)] * given.nodes, strategy="STRICT_SPREAD")
    relays: list[Any] = []
    try:
        while not group.wait(_WORD_S):
            sys.stderr.write(f"Waiting for {given.nodes} nodes of the Ray cluster ...\n")
        relays = [relay_on(group, index, gpus=given.gpus) for index in range(given.nodes)]
        known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        address = known[placement_group_table(group)["bundles_to_node_id"][0]]
        port = ray.get(relays[0].free_port.remote())
        environ, cwd = agent_environment(os.environ), str(Path.cwd())
        ray.get(
            [
                relay.start.remote(
                    torchrun_words(
                        given.words, nodes=given.nodes, node=index, ranks=given.ranks, address=address, port=port
                    ),
                    environ,
                    cwd,
                    errors=True,
                )
                for index, relay in enumerate(relays)
            ]
        )
        return _follow(relays)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        ray.wait(
            [relay.close.remote() for relay in relays], num_returns=len(relays), timeout=_END_S
        ) if relays else None
        remove_placement_group(group)
        ray.shutdown()


def _follow(relays: Sequence[Any]) -> int:
    """Write what nodes say until all have ended, or one has failed; return the exit code."""
    import ray

    asked = {relay.exchange.remote(b"", _WAIT_S): relay for relay in relays}
    while asked:
        (ready,), _ = ray.wait(list(asked), num_returns=1)
        relay = asked.pop(ready)
        said, code = ray.get(ready)
        sys.stdout.buffer.write(said)
        sys.stdout.buffer.flush()
        if code is None or said:
            asked[relay.exchange.remote(b"", _WAIT_S)] = relay
        elif code:
            return int(code) if code > 0 else 128 - int(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
