"""Warm launches: the tuner's end of the fork server (``runtime/agent/fork_server.py``).

The fork server has imported torch, DeepSpeed and the other modules of the script. It forks torchrun's agent for each
launch, and the agent forks the ranks, so that start-up time is mostly the script's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna_dsat.launch.machine.processes import end_with_descendants, exit_code_of, kill_leftovers
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.agent.processes import MARK_ENV, ProcessKey, children_of
from optuna_dsat.script.interpreter import module_command

_PRELOAD_LIMIT_S = 300.0
"""Longest wait for the imports; a cold disk takes minutes."""

_ANSWER_LIMIT_S = 30.0
"""Longest wait for a fork."""

_REPORT_LIMIT_S = 10.0
"""Longest wait for the report that an agent has ended."""


class WarmUnavailableError(RuntimeError):
    """Launches cannot be forked, for the reason in the message; plain torchrun is used instead."""


class WarmAgent:
    """A torchrun forked by the server (an ``AgentHandle``).

    Attributes:
        preload: Modules imported in its ranks.
    """

    def __init__(self, server: ForkServer, launch_id: str, preload: Preload) -> None:
        self._server = server
        self._launch_id = launch_id
        self.preload = preload
        self.pid = server.await_start(launch_id)
        self.returncode: int | None = None
        self._key = ProcessKey.of(self.pid)
        self._ended_at: float | None = None
        """Monotonic time at which its end was first detected."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self._launch_id)
        if self.returncode is None:
            self.returncode = self._unreported()
        return self.returncode

    def _unreported(self) -> int | None:
        """Return the exit code if the server cannot report the end because it was stopped, else None."""
        code = None if self._key is None else exit_code_of(self._key)
        if code is None:
            return None
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        if now - self._ended_at < _REPORT_LIMIT_S:
            return None
        self._server.settle(self._launch_id, code)
        return code

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        while (code := self.poll()) is None:
            self._server.receive(0.1)
        return code


class ForkServer:
    """The process that launches are forked from, and the connection to it."""

    def __init__(self, environ: Mapping[str, str], log: Path, *, python: str) -> None:
        self._mark = environ[MARK_ENV]
        ours, theirs = socket.socketpair()
        command = module_command(python, "optuna_dsat.runtime.agent.fork_server", "-u")
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                cwd="/",
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.log = log
        self._socket = ours
        self._partial = b""
        self._ready: list[Mapping[str, Any]] = []
        self._pids: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._refusals: dict[str, str] = {}
        self._running: set[str] = set()
        self._dead = False
        self.is_stuck = False
        """Whether it has not answered an order or reported an end, for example because it was stopped."""

    def order(self, **order: Any) -> None:
        """Send a request.

        Raises:
            WarmUnavailableError: If the process has ended.
        """
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            self._dead = True
            raise self._ended() from None

    def _ended(self) -> WarmUnavailableError:
        return WarmUnavailableError(f"the process that launches are forked from has ended; see {self.log}")

    def receive(self, timeout_s: float) -> None:
        """Read the process's events; wait up to ``timeout_s`` seconds for events."""
        if self._dead or not select.select([self._socket], [], [], timeout_s)[0]:
            return
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._socket.recv(1 << 20)
        self._dead = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if answer["event"] == "ready":
                self._ready.append(answer)
            elif answer["event"] == "started":
                self._pids[answer["launch_id"]] = answer["pid"]
                self._running.add(answer["launch_id"])
            elif answer["event"] == "refused":
                self._refusals[answer["launch_id"]] = answer["why"]
            else:
                self._codes[answer["launch_id"]] = answer["exit_code"]
                self._running.discard(answer["launch_id"])

    @property
    def finished_preloads(self) -> int:
        """Number of finished preloads not yet returned by ``await_ready``."""
        self.receive(0.0)
        return len(self._ready)

    def await_ready(self) -> Mapping[str, Any]:
        """Wait for the end of the imports and return the ``ready`` event.

        Raises:
            WarmUnavailableError: If the process ended or takes too long.
        """
        self._await(lambda: bool(self._ready), _PRELOAD_LIMIT_S)
        return self._ready.pop(0)

    def await_start(self, launch_id: str) -> int:
        """Wait until a launch is forked and return its PID.

        Raises:
            WarmUnavailableError: If the process ended, takes too long, or cannot fork.
        """
        self._codes.pop(launch_id, None)
        self._await(lambda: launch_id in self._pids or launch_id in self._refusals, _ANSWER_LIMIT_S)
        if (why := self._refusals.pop(launch_id, None)) is not None:
            raise WarmUnavailableError(why)
        return self._pids.pop(launch_id)

    def _await(self, condition: Any, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if self._dead:
                raise self._ended()
            if time.monotonic() > deadline:
                self.is_stuck = True
                raise WarmUnavailableError(
                    f"the process that launches are forked from gave no answer in {limit_s:g} s; see {self.log}"
                )
            self.receive(0.2)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended without a request."""
        self.receive(0.0)
        return self._dead or self.process.poll() is not None

    @property
    def is_idle(self) -> bool:
        """Whether no launch forked from it is running."""
        self.receive(0.0)
        return self._dead or not self._running

    def exit_code(self, launch_id: str) -> int | None:
        """Return a launch's exit code, None while it runs; a launch of a dead server was killed (SIGKILL)."""
        self.receive(0.0)
        if launch_id in self._codes:
            return self._codes[launch_id]
        return -signal.SIGKILL if self._dead else None

    def settle(self, launch_id: str, exit_code: int) -> None:
        """Record the end of a launch that the process does not report."""
        self._codes[launch_id] = exit_code
        self._running.discard(launch_id)
        self.is_stuck = True

    def close(self) -> None:
        """Kill the process with all launches forked from it, and end processes started by its imports."""
        parent = ProcessKey.of(self.process.pid)
        below = children_of(() if parent is None else (parent,))
        self.process.kill()  # first, because it exits once the socket is closed
        self._socket.close()
        self._dead = True
        self.process.wait()
        with contextlib.suppress(TimeoutError):  # reported at the next start
            end_with_descendants(below)
            kill_leftovers(self._mark)
