"""A Ray actor on each node that runs the node's agent or a training, and forwards its input and output.

The agent is a separate process (``launch/places/node_agent.py``), as under SLURM, because Ray workers have threads,
signal handlers and an environment set by Ray. This module does not import Ray.
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

    The process is ended by closing its input and by SIGTERM. This also happens if the node's raylet, the parent of this
    worker, is gone or stopped.
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
        """Start a Python process, by default with the interpreter of Ray's worker.

        It has the head's environment and, if that exists here, its working directory. With ``errors``, standard error
        is forwarded together with standard output.
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
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
    return False
