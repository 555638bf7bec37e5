"""An allocation in a Ray cluster: a placement group with a bundle per node, each with an actor that runs an agent.

The agent is a separate process (``launch/places/node_agent.py``), as under SLURM, because Ray workers have threads,
signal handlers and an environment set by Ray.
"""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from optuna_dsat.launch.agent.files import Joiner
from optuna_dsat.launch.places.engine import LOST_S, PING_S, ClusterError, News, Order, PlaceState, ping_order
from optuna_dsat.launch.places.ray_nodes import group_of
from optuna_dsat.launch.places.slurm import agent_environment
from optuna_dsat.runtime.process_identity import stat_fields

_KEPT = ("CUDA_VISIBLE_DEVICES", "HOSTNAME")
_KEPT_PREFIXES = ("RAY_", "NVIDIA_")
"""Variables whose values are specific to the node."""
_SET_BY_RAY = ("OMP_NUM_THREADS",)
"""Variables that Ray sets for its workers; replaced by the head's value, or unset."""
_WATCH_S = 0.5
"""Interval between checks of the raylet."""
_FROZEN_S = 10.0
"""Time for which the raylet must be stopped before this node counts as frozen."""
_END_S = 5.0
"""Longest wait for a process to end after SIGTERM."""
_LAST_WORDS_S = 1.0
"""Longest wait for the last output of an ended process, as its children may keep the output open."""


def node_environment(of_head: Mapping[str, str], of_worker: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent: the head's, as under SLURM, except for node-specific variables."""

    def is_own(name: str) -> bool:
        return name in _KEPT or name.startswith(_KEPT_PREFIXES)

    rest = {name: value for name, value in of_worker.items() if name not in _SET_BY_RAY}
    head = {name: value for name, value in of_head.items() if not is_own(name)}
    return {**rest, **head}


class NodeRelay:
    """Runs a process on a node. Ray calls its methods sequentially on a single thread.

    The process is ended, by closing its input and SIGTERM, also if the node's raylet, its grandparent, is gone or
    stopped.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._parent = os.getppid()

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        cwd: str,
        *,
        errors: bool = False,
        python: str | None = None,
    ) -> None:
        """Start a Python process with the head's environment and, if that exists here, its working directory.

        With ``errors``, standard error is forwarded together with standard output.
        """
        self._process = subprocess.Popen(
            [python or sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors else None,
            env=node_environment(environment, os.environ),
            cwd=cwd if Path(cwd).is_dir() else None,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def free_port(self) -> int:
        """Return a free port of this node."""
        with socket.socket() as result:
            result.bind(("", 0))
            return int(result.getsockname()[1])

    def exchange(self, orders: bytes, wait_s: float) -> tuple[bytes, int | None]:
        """Write to the process; return its new output, and its exit code once it has ended and all output was read."""
        process, reader = self._process, self._reader
        if process is None or process.stdin is None or reader is None:
            raise RuntimeError("no process was started")
        with suppress(OSError, ValueError):  # it has ended, see the exit code
            process.stdin.write(orders)
            process.stdin.flush()
        code = process.poll()
        if code is not None:
            reader.join(_LAST_WORDS_S)
        text = b""
        with suppress(queue.Empty):
            text = self._said.get(timeout=wait_s if code is None else 0)
            while True:
                text += self._said.get_nowait()
        return text, code

    def close(self) -> None:
        """End the process and its children, and wait for their end."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):  # it has ended
                process.stdin.close()
        process.terminate()
        try:
            process.wait(0 if _is_stopped(process.pid) else _END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while data := os.read(descriptor, 1 << 16):
            self._said.put(data)

    def _watch(self) -> None:
        """End the process if the raylet is gone or frozen, because nothing else would while this worker lives.

        Ray itself notices a stopped raylet only after a minute, and does not end anything on its node.
        """
        moved = time.monotonic()
        while os.getppid() == self._parent and time.monotonic() - moved < _FROZEN_S:
            time.sleep(_WATCH_S)
            if not _is_stopped(self._parent):
                moved = time.monotonic()
        self.close()
        os._exit(1)


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal or a debugger (``/proc/PID/stat``: proc(5))."""
    return stat_fields(pid)[:1] in (["T"], ["t"])


_WAIT_S = 0.05
"""Longest wait of a node for output of its agent, per exchange."""
_BEGIN_S = 120.0
"""Longest wait for an agent's first message; its node may have to import torch from a slow disk."""
_GOODBYE_S = 8.0
"""Longest wait for agents to end before their actors are killed."""
_ASK_S = 1.0
"""Interval between queries for the queue reason."""


def relay_on(group: Any, index: int, *, gpus: int) -> Any:
    """Return a new actor that runs a process and takes a whole bundle of a placement group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    limits = {"max_restarts": 0, "max_concurrency": 1, "scheduling_strategy": where}
    return ray.remote(NodeRelay).options(num_cpus=1, num_gpus=gpus, **limits).remote()


_WHY = {
    "NO_RESOURCES": "no resources: others hold them",
    "FAILED_TO_COMMIT_RESOURCES": "no resources: a node was taken or lost meanwhile",
    "INFEASIBLE": "infeasible: too few nodes of the cluster that live could hold it",
}
"""Ray's state of a pending placement group -> message for the user."""
_ERROR = re.compile(r"[A-Za-z_.]+(Error|Exception): ")
"""Start of a line that names an exception."""


class _Phase(Enum):
    """Next action for an allocation."""

    PENDING = "the placement group is pending"
    TALKING = "agents are started or talked to"
    LEAVING = "agents are told to end"
    GONE = "nothing of it is left"


@dataclass(kw_only=True)
class _Node:
    """A node of an allocation."""

    name: str
    actor: Any
    asked: Any
    """Reference of the pending call; None for none."""
    heard_at: float
    """Monotonic time of the agent's last message."""
    spoke: bool = False
    orders: list[bytes] = field(default_factory=list)
    """Lines for its agent that have not been sent yet."""
    joiner: Joiner = field(default_factory=Joiner)


class RayPlace:
    """An allocation. All methods but the properties are called from the engine's own thread."""

    def __init__(
        self,
        *,
        nodes: int,
        slots: int,
        number: int,
        names: Sequence[str],
        python: str | None,
    ) -> None:
        self._slots = slots
        self._python = python
        self._names = names
        self._count = nodes
        self._number = number
        self._group: Any = None
        self._granted: Any = None
        self._nodes: list[_Node] = []
        self._phase = _Phase.PENDING
        self.state = PlaceState.QUEUED
        self.why = ""
        """Why it is queued, in Ray's terms, or why it is lost."""
        self._pinged_at = self._asked_at = self._left_at = 0.0
        self._goodbyes: list[Any] = []

    @property
    def name(self) -> str:
        """Name for the user."""
        return f"Ray placement group {self._number}"

    @property
    def is_gone(self) -> bool:
        """Whether all its actors and its placement group have been removed."""
        return self._phase is _Phase.GONE

    def references(self) -> list[Any]:
        """Return the pending references in Ray."""
        if self._phase is _Phase.PENDING:
            return [self._granted] if self._granted is not None else []
        if self._phase is _Phase.LEAVING:
            return list(self._goodbyes)
        return [node.asked for node in self._nodes if node.asked is not None]

    def give(self, order: Order, *, node: int | None) -> None:
        """Queue a command for a node, or for all nodes for None; ignored if lost or released."""
        if self._phase in (_Phase.LEAVING, _Phase.GONE):
            return
        line = json.dumps(order).encode("ascii") + b"\n"
        for index, item in enumerate(self._nodes):
            if node in (None, index):
                item.orders.append(line)

    def advance(self, ready: Sequence[Any]) -> Iterator[News]:
        """Process answers; yield messages of agents."""
        now = time.monotonic()
        if self._phase is _Phase.PENDING:
            self._ask_for_it(ready, now)
        elif self._phase is _Phase.TALKING:
            yield from self._talk(ready, now)
        elif self._phase is _Phase.LEAVING:
            self._goodbyes = [item for item in self._goodbyes if item not in ready]
            if not self._goodbyes or now - self._left_at > _GOODBYE_S:
                self._remove()

    def leave(self, why: str = "") -> None:
        """Stop the agents and release the nodes. With a reason, mark the allocation as lost."""
        if self._phase in (_Phase.LEAVING, _Phase.GONE):
            return
        self.why = why
        self.state = PlaceState.LOST
        self._left_at = time.monotonic()
        self._goodbyes = [node.actor.close.remote() for node in self._nodes]
        self._phase = _Phase.LEAVING

    def give_up(self, why: str) -> None:
        """Mark the allocation as lost without calling Ray, which does not answer."""
        self.state, self.why, self._phase = PlaceState.LOST, why, _Phase.GONE
        # Ray ends this process if one of these is deleted once it is disconnected
        self._nodes, self._goodbyes, self._granted, self._group = [], [], None, None

    def _ask_for_it(self, ready: Sequence[Any], now: float) -> None:
        """Request the nodes, then query why they are pending, then start an agent on each."""
        from ray.util import placement_group_table

        if self._group is None:
            try:
                self._group = group_of(nodes=self._count, slots=self._slots, names=self._names)
            except ClusterError as error:
                return self.leave(str(error).rstrip("."))
            self._granted = self._group.ready()
        elif self._granted in ready:
            self._start(placement_group_table(self._group), now)
        elif now - self._asked_at > _ASK_S:
            self._asked_at = now
            state = str(placement_group_table(self._group).get("stats", {}).get("scheduling_state", ""))
            self.why = _WHY.get(state, state.lower().replace("_", " "))
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
            environ = agent_environment(os.environ)
            asked = actor.start.remote(words, environ, str(Path.cwd()), python=self._python)
            self._nodes.append(_Node(name=name, actor=actor, asked=asked, heard_at=now))
        self.why = "its agents start"
        self._phase = _Phase.TALKING

    def _talk(self, ready: Sequence[Any], now: float) -> Iterator[News]:
        """Process the answers of nodes and call each again."""
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
                return self.leave(f"{node.name} said nothing for {silent_s:.0f} s")
        if self.state is PlaceState.QUEUED and all(node.spoke for node in self._nodes):
            self.state, self.why = PlaceState.READY, ""
        return None

    def _answer(self, index: int, node: _Node, now: float) -> Iterator[News]:
        """Yield messages in a node's answer and call it again; mark the allocation as lost if the call failed."""
        import ray

        try:
            answer = ray.get(node.asked)
        except ray.exceptions.RayError as error:
            gone = node.spoke and isinstance(error, ray.exceptions.RayActorError)
            return self.leave(f"Ray's actor on {node.name} is gone" if gone else f"{node.name}: {cause_of(error)}")
        text, ended = answer or (b"", None)
        arrived = time.time()
        if text:
            node.heard_at, node.spoke = now, True
        for _, message in node.joiner.feed(text):
            yield News(place=self, node=index, message=message, time=arrived)
        if ended is not None and not text:
            return self.leave(f"the agent on {node.name} ended with {ended}")
        orders, node.orders = b"".join(node.orders), []
        node.asked = node.actor.exchange.remote(orders, _WAIT_S)
        return None

    def _remove(self) -> None:
        """Kill the remaining actors and release the nodes."""
        import ray
        from ray.util import remove_placement_group

        for node in self._nodes:
            ray.kill(node.actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._nodes, self._goodbyes = [], []
        self._phase = _Phase.GONE


def cause_of(error: BaseException) -> str:
    """Return a one-line message for an error of Ray: the last exception it names, which was raised on the node."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.match(line)]
    return (named or lines[:1] or [type(error).__name__])[-1]
