"""What runs in a Ray actor on each node: it holds the node's agent, or a training, and passes bytes on.

The agent is a process of its own (``launch/places/node_agent.py``), as under SLURM: a Ray worker has threads, signal
handlers and an environment of Ray's. Of Ray, nothing is imported here.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
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
_FROZEN_S = 10.0
"""Time that the raylet has to be stopped before this node counts as frozen."""
_END_S = 5.0
"""Longest wait for a process that was told to end."""
_LAST_WORDS_S = 1.0
"""Longest wait for what a process said before it ended; what it started may hold its output open."""


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
    """Holds a process on one node. Ray calls its methods one at a time, on one thread.

    The process is asked to end by the end of its input, or by SIGTERM. It is asked so, too, if Ray's own process of the
    node (raylet), which started this one, is gone or stands still.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._parent = os.getppid()

    def start(self, words: Sequence[str], environment: Mapping[str, str], cwd: str, *, errors: bool = False) -> None:
        """Start a process of this node's Python.

        Args:
            words: What Python is to run: its options and arguments.
            environment: Environment of the head.
            cwd: Working directory of the head, used here where it exists.
            errors: Whether its errors are passed on as its output is.
        """
        self._process = subprocess.Popen(
            [sys.executable, *words],
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
        """Return a port that nobody listens on here."""
        with socket.socket() as found:
            found.bind(("", 0))
            return int(found.getsockname()[1])

    def exchange(self, orders: bytes, wait_s: float) -> tuple[bytes, int | None]:
        """Write to the process; return what it has said since, and its exit code once it has ended and said all.

        Args:
            orders: Lines for the process.
            wait_s: Longest wait for it to say something.
        """
        process, reader = self._process, self._reader
        if process is None or process.stdin is None or reader is None:
            raise RuntimeError("no process was started")
        with suppress(OSError, ValueError):  # it has ended, as the exit code says
            process.stdin.write(orders)
            process.stdin.flush()
        code = process.poll()
        if code is not None:
            reader.join(_LAST_WORDS_S)
        said = b""
        with suppress(queue.Empty):
            said = self._said.get(timeout=wait_s if code is None else 0)
            while True:
                said += self._said.get_nowait()
        return said, code

    def close(self) -> None:
        """Have the process end, and what it started; wait for that."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):  # it has ended
                process.stdin.close()
        process.terminate()
        try:
            process.wait(_END_S)
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
        """End the process once the raylet is gone or frozen: nobody else would, while this worker lives on.

        Ray itself misses a raylet that is stopped only after a minute, and ends nothing on its node.
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
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
    return False
