"""Run torchrun on nodes of a Ray cluster.

Started as ``python -m optuna_dsat.launch.places.ray_train --nodes N --ranks K -- SCRIPT ...``.

A search on Ray prints this command for the full training. It requests nodes as for the trials, and each node runs
torchrun with this process's environment (``launch/places/guarded.py``: no process outlives this process). The output
of all nodes is written here; the exit code is from the first node that fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from optuna_dsat.errors import DsatError
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.places.engine import LOST_S, ClusterError
from optuna_dsat.launch.places.ray_engine import address_of, join_cluster, leave_cluster
from optuna_dsat.launch.places.ray_nodes import group_of, refuse_impossible
from optuna_dsat.launch.places.ray_place import cause_of, relay_on
from optuna_dsat.launch.places.slurm import agent_environment
from optuna_dsat.signals import ENDING
from optuna_dsat.words import things_in_words

_WAIT_S = 0.5
_WORD_S = 10.0
"""Interval between messages while waiting for nodes."""
_BEGIN_S = 120.0
"""Longest wait for a node to start."""
_END_S = 10.0
"""Longest wait for all nodes to end."""


def main(argv: Sequence[str]) -> int:
    """Train; return the exit code."""
    parser = argparse.ArgumentParser(prog="ray_train")
    parser.add_argument("--address")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, required=True, help="Ranks of a node.")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a node.")
    parser.add_argument("--node", action="append", default=[], help="Node that may be used (repeatable).")
    parser.add_argument("--python", help="Interpreter of the script on each node.")
    parser.add_argument("words", nargs="+", help="The script, or -m and a module, with arguments, after --.")
    given = parser.parse_args(argv)
    for number in set(ENDING) - {signal.SIGINT}:
        signal.signal(number, _end)
    try:
        join_cluster(address_of(given.address))
        refuse_impossible(nodes=given.nodes, slots=given.gpus, names=given.node)
    except ClusterError as error:
        return _refused(error)
    import ray

    try:
        return _train(given)
    except DsatError as error:
        return _refused(error)
    except ray.exceptions.RayError as error:
        sys.stderr.write(f"optuna-dsat: {cause_of(error)}.\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        leave_cluster()


def _refused(error: DsatError) -> int:
    sys.stderr.write(f"optuna-dsat: {error}\n")
    return error.exit_code


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def torchrun_words(
    words: Sequence[str], *, nodes: int, node: int, ranks: int, address: str, port: int, python: str | None = None
) -> list[str]:
    """Return the arguments of Python on a node; address and port belong to node 0."""
    where = ["--rdzv_backend", "static", "--master_addr", address, "--master_port", str(port)]
    shape = ["--nnodes", str(nodes), "--node_rank", str(node), "--nproc_per_node", str(ranks)]
    command = [python or "", "-m", "torch.distributed.run", *shape, *where, *words]
    return ["-m", "optuna_dsat.launch.places.guarded", *command]


def _train(given: argparse.Namespace) -> int:
    """Allocate the nodes and run torchrun on each."""
    import ray
    from ray.util import placement_group_table, remove_placement_group

    group = group_of(nodes=given.nodes, slots=given.gpus, names=given.node)
    relays: list[Any] = []
    try:
        while not group.wait(_WORD_S):
            sys.stderr.write(f"Waiting for {things_in_words(given.nodes, 'node')} of the Ray cluster ...\n")
        relays = [relay_on(group, index, gpus=given.gpus) for index in range(given.nodes)]
        _start(given, relays, address=_address_in(placement_group_table(group)))
        return _follow(relays)
    finally:
        if relays:
            ray.wait([relay.close.remote() for relay in relays], num_returns=len(relays), timeout=_END_S)
        remove_placement_group(group)


def _address_in(table: Mapping[str, Any]) -> str:
    """Return the address of the first node of a placement group."""
    import ray

    known = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    return known[table["bundles_to_node_id"][0]]


def _start(given: argparse.Namespace, relays: Sequence[Any], *, address: str) -> None:
    """Start torchrun on each node."""
    import ray

    port = ray.get(relays[0].free_port.remote(), timeout=_BEGIN_S)
    environ, cwd = agent_environment(os.environ), str(Path.cwd())
    begun = []
    for index, relay in enumerate(relays):
        words = torchrun_words(
            given.words,
            nodes=given.nodes,
            node=index,
            ranks=given.ranks,
            address=address,
            port=port,
            python=given.python,
        )
        begun.append(relay.start.remote(words, environ, cwd, errors=True))
    ray.get(begun, timeout=_BEGIN_S)


def _follow(relays: list[Any]) -> int:
    """Forward the nodes' output until all have ended or one has failed; return the exit code, remove silent relays."""
    import ray

    def ask(node: int) -> None:
        asked[relays[node].exchange.remote(b"", _WAIT_S)] = (node, time.monotonic())

    asked: dict[Any, tuple[int, float]] = {}
    for node in range(len(relays)):
        ask(node)
    while asked:
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=_WAIT_S)
        for item in ready:
            node, _ = asked.pop(item)
            text, code = ray.get(item)
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
            if code is None:
                ask(node)
            elif code:
                return int(code)
        silent = [node for node, since in asked.values() if time.monotonic() - since > LOST_S]
        if silent:
            relays[:] = [relay for node, relay in enumerate(relays) if node not in silent]
            raise DeviceError(f"Node {silent[0]} of the training has given no answer for {LOST_S:g} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
