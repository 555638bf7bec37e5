"""What runs in a Ray actor on each node of a place: it holds the process of the node's agent, and passes bytes on.

The agent is a process of its own (``cluster/agent.py``), as under SLURM: a Ray worker has threads, signal handlers and
an environment of Ray's. Of Ray, nothing is imported here.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["NodeRelay", "node_environment"]

_KEPT = ("CUDA_VISIBLE_DEVICES", "HOSTNAME")
_KEPT_PREFIXES = ("RAY_", "NVIDIA_")
"""Variables that are the node's own."""
_SET_BY_RAY = ("OMP_NUM_THREADS",)
"""Variables that Ray sets for its workers, in place of which the head's count, or none."""
_WATCH_S = 0.5
"""Time between two looks at whether the raylet lives."""
_END_S = 5.0
"""Longest wait for an agent that was told to end."""


def node_environment(of_head: Mapping[str, str], of_worker: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent: the head's, as under SLURM, but for what a node knows better.

    Args:
        of_head: Environment of the process that tunes.
        of_worker: Environment of Ray's worker on the node.
    """

    def is_own(name: str) -> bool:
        return name in _KEPT or name.startswith(_KEPT_PREFIXES)

    rest = {name: value for name, value in of_worker.items() if name not in _SET_BY_RAY}
    head = {name: value for name, value in of_head.items() if not is_own(name)}
    return {**rest, **head}


class NodeRelay:
    """Holds the agent of one node. Ray calls its methods one at a time, on the thread that the agent is tied to.

    If Ray's own process of the node, which started this one, is gone, the agent ends.
    """

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._parent = os.getppid()

    def start(self, node: int, name: str, environment: Mapping[str, str], cwd: str) -> None:
        """Start the agent.

        Args:
            node: Number of the node in its place.
            name: What the cluster calls the node.
            environment: Environment of the head.
            cwd: Working directory of the head, used here where it exists.
        """
        self._agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "optuna_dsat.cluster.agent", str(node), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=node_environment(environment, os.environ),
            cwd=cwd if Path(cwd).is_dir() else None,
            start_new_session=True,
        )
        for work in (self._read, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def exchange(self, orders: bytes, wait_s: float) -> tuple[bytes, int | None]:
        """Pass orders to the agent; return what it has said since, and its exit code once it has ended.

        Args:
            orders: Lines for the agent.
            wait_s: Longest wait for it to say something.
        """
        agent = self._agent
        if agent is None or agent.stdin is None:
            raise RuntimeError("no agent was started")
        with suppress(OSError, ValueError):  # it has ended, as the exit code says
            agent.stdin.write(orders)
            agent.stdin.flush()
        said = b""
        try:
            said = self._said.get(timeout=wait_s)
            while True:
                said += self._said.get_nowait()
        except queue.Empty:
            return said, agent.poll()

    def close(self) -> None:
        """End the agent and its launches; wait for that."""
        agent = self._agent
        if agent is None:
            return
        if agent.stdin is not None:
            with suppress(OSError):  # it has ended
                agent.stdin.close()
        try:
            agent.wait(_END_S)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()

    def _read(self) -> None:
        assert self._agent is not None
        assert self._agent.stdout is not None
        descriptor = self._agent.stdout.fileno()
        while data := os.read(descriptor, 1 << 16):
            self._said.put(data)

    def _watch(self) -> None:
        """End the agent once Ray's process of this node is gone: nobody else would, while this worker lives on."""
        while os.getppid() == self._parent:
            time.sleep(_WATCH_S)
        self.close()
        os._exit(1)
