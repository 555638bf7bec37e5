"""Warm launches: the tuner's end of the fork server (``launch/warm/process.py``).

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
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna_dsat.launch.machine.processes import (
    MARK_ENV,
    ProcessKey,
    children_of,
    end_with_descendants,
    exit_code_of,
    kill_leftovers,
    new_mark,
)
from optuna_dsat.launch.protocol import Preload
from optuna_dsat.launch.run_directory import RANK_VARIABLES, TRACKER_FOLDERS, RunDirectory
from optuna_dsat.runtime.rank import LAUNCH_ENV

__all__ = ["WarmAgent", "WarmLaunches", "WarmOrder", "WarmUnavailableError", "can_fork"]

_PRELOAD_LIMIT_S = 300.0
"""Longest wait for the imports; a cold disk takes minutes."""

_EXIT_LIMIT_S = 2.0
"""Longest wait for the exit code of a server that has closed its socket."""
_ANSWER_LIMIT_S = 30.0
"""Longest wait for a fork."""

_REPORT_LIMIT_S = 10.0
"""Longest wait for the report that an agent has ended."""

_RESTARTS = 5
"""Maximum restarts of the server, to exclude packages or after it died."""

_PER_LAUNCH = frozenset({LAUNCH_ENV, MARK_ENV, "CUDA_VISIBLE_DEVICES", "PYTHONPATH", *TRACKER_FOLDERS})
"""Environment variables that may differ between launches of a study."""

_WATCHED = RANK_VARIABLES | TRACKER_FOLDERS
"""Environment variables that no import may read before a fork. The server has none of them, so that code that copies
its whole environment does not count as a reader."""


class WarmUnavailableError(RuntimeError):
    """Launches cannot be forked, for the reason in the message; plain torchrun is used instead."""


@dataclass(frozen=True, kw_only=True)
class WarmOrder:
    """A launch to fork."""

    launch_id: str
    mark: str
    arguments: Sequence[str]
    """torchrun's arguments, without ``python -m torch.distributed.run``."""
    environ: Mapping[str, str]
    cwd: str
    directory: RunDirectory


def can_fork() -> bool:
    """Return whether this platform supports warm launches: it has ``/proc`` and pidfds."""
    return sys.platform.startswith("linux") and hasattr(os, "pidfd_open")


class WarmAgent:
    """A torchrun forked by the server (an ``AgentHandle``).

    Attributes:
        preload: Modules imported in its ranks.
    """

    def __init__(self, server: _ForkServer, launch_id: str, preload: Preload) -> None:
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


class _ForkServer:
    """The process from which launches are forked, and the connection to it."""

    def __init__(self, environ: Mapping[str, str], log: Path) -> None:
        self._mark = environ[MARK_ENV]
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-u", "-m", "optuna_dsat.launch.warm.process"]
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
        own = ProcessKey.of(self.process.pid)
        below = children_of(() if own is None else (own,))
        self.process.kill()  # first, because it exits once the socket is closed
        self._socket.close()
        self._dead = True
        self.process.wait()
        with contextlib.suppress(TimeoutError):  # reported at the next start
            end_with_descendants(below)
            kill_leftovers(self._mark)


class WarmLaunches:
    """Starts launches by forking, or raises ``WarmUnavailableError``.

    Args:
        log: File for the output of the imports.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._server: _ForkServer | None = None
        self._retired: list[_ForkServer] = []
        """Servers that no longer fork but have running launches."""
        self._environ: dict[str, str] = {}
        self._preload = Preload()
        self._preloads_pending = 0
        """Preloads that the server has not finished."""
        self._restarts = 0
        self._deaths = 0
        """Number of servers that exited or were killed."""
        self._failed = ""
        """Why no server completes its imports; empty unless a server exited during imports."""
        self._read: set[str] = set()
        """Environment variables that the server's imports have read."""
        self._proven: Preload | None = None
        """Preload of a forked launch that has trained; None without such a launch."""

    @property
    def preload(self) -> Preload:
        """Preload of the server."""
        return self._preload

    @property
    def is_importing(self) -> bool:
        """Whether the next launch may have to wait for imports."""
        return self._server is None or self._preloads_pending > 0

    def has_proven(self, preload: Preload) -> bool:
        """Return whether a forked launch with this preload has trained."""
        return self._proven == preload

    def prove(self, preload: Preload) -> None:
        """Record that a forked launch with this preload has trained."""
        self._proven = preload

    def retreat(self) -> bool:
        """Return to the modules proven to survive a fork; False if there are none or they are in use."""
        if self._proven is None or self._proven == self._preload:
            return False
        self.retire()
        self._preload = self._proven
        return True

    def retire(self) -> None:
        """Stop forking from the current server; it is ended once the launches forked from it are over."""
        if self._server is not None:
            self._retired.append(self._server)
            self._server = None
        for server in [server for server in self._retired if server.is_idle]:
            self._retired.remove(server)
            server.close()

    def wait(self) -> None:
        """Wait until the server has finished its imports.

        Raises:
            WarmUnavailableError: If launches cannot be forked from it.
        """
        self._ready_server(self._environ)

    def prepare(self, preload: Preload) -> None:
        """Set the shared modules of launches; imported at once if the server runs, else with the first launch."""
        self._preload = replace(preload, left_out=tuple(sorted({*self._preload.left_out, *preload.left_out})))
        self._drop_if_ended()
        if self._server is not None and (self._preloads_pending or self._read & set(preload.environment)):
            self.retire()  # it may have read variables that the script changes: a new server is watched from its start
        elif self._server is not None:
            self._order_preload(self._server)

    def begin(self, environ: Mapping[str, str]) -> None:
        """Start the server for launches in ``environ``, unless it runs, and its imports; does not wait.

        Raises:
            WarmUnavailableError: If this platform does not support it.
        """
        self._drop_if_ended()
        if self._server is not None:
            return
        if not can_fork():
            raise WarmUnavailableError("it needs Linux 5.3 or newer")
        if self._failed:
            raise WarmUnavailableError(self._failed)
        if self._deaths > _RESTARTS:
            raise WarmUnavailableError(f"the process that launches are forked from was killed {self._deaths} times")
        self._environ = dict(environ)
        hidden = _WATCHED | {LAUNCH_ENV, *self._preload.environment}
        own = {name: value for name, value in environ.items() if name not in hidden}
        own[MARK_ENV] = new_mark()  # it outlives the launch that ``environ`` belongs to
        self._server = _ForkServer(own, self._log)
        self._preloads_pending = 0
        self._read = set()
        self._order_preload(self._server)

    @property
    def is_ready(self) -> bool:
        """Whether a fork would not wait for imports: finished, not started, or their process has ended."""
        return (
            self._server is None or self._server.has_ended or self._server.finished_preloads >= self._preloads_pending
        )

    def _drop_if_ended(self) -> None:
        if self._server is None:
            return
        if self._server.has_ended:
            self._drop(self._server)
        elif self._server.is_stuck:
            self._deaths += 1
            self.retire()

    def _drop(self, server: _ForkServer) -> None:
        """Discard a server that has ended; the next launch starts a new server, a few times at most."""
        self._deaths += 1
        self._server = None
        if server.has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(_EXIT_LIMIT_S)
        server.close()
        code = server.process.returncode
        if self._preloads_pending and code is not None and code >= 0:  # it exited: a new server would, too
            self._failed = f"importing what the script imports ended with exit code {code}; see {server.log}"

    def _order_preload(self, server: _ForkServer) -> None:
        server.order(do="preload", preload=self._preload.to_json(), watched=sorted(_WATCHED))
        self._preloads_pending += 1

    def start(self, order: WarmOrder) -> WarmAgent:
        """Fork a launch; wait for the imports if they are not finished.

        Raises:
            WarmUnavailableError: If it cannot be forked.
        """
        while True:
            self.begin(order.environ)
            self._check_environment(order.environ)
            server = self._ready_server(order.environ)
            try:
                server.order(
                    do="launch",
                    launch_id=order.launch_id,
                    mark=order.mark,
                    record=str(order.directory.agent_record),
                    arguments=list(order.arguments),
                    environ=dict(order.environ),
                    cwd=order.cwd,
                    log=str(order.directory.agent_log),
                )
                return WarmAgent(server, order.launch_id, self._preload)
            except WarmUnavailableError:
                if not server.has_ended:
                    self._drop_if_ended()
                    raise  # it refuses, or is stuck; a server that was just killed is restarted

    def _check_environment(self, environ: Mapping[str, str]) -> None:
        changed = {
            name
            for name in (environ.keys() | self._environ.keys()) - _PER_LAUNCH
            if environ.get(name) != self._environ.get(name)
        }
        if changed:
            raise WarmUnavailableError(f"the environment of this launch differs in {', '.join(sorted(changed))}")

    def _ready_server(self, environ: Mapping[str, str]) -> _ForkServer:
        while True:
            if self._server is None:
                self.begin(environ)
            if (server := self._server) is None:
                raise WarmUnavailableError("there is no process to fork from")
            refused: dict[str, str] = {}
            try:
                while self._preloads_pending:
                    ready = server.await_ready()
                    self._preloads_pending -= 1
                    refused |= ready["refused"]
                    self._read |= set(ready["read"])
            except WarmUnavailableError:
                killed = server.has_ended
                self._drop(server)
                if killed and not self._failed and self._deaths <= _RESTARTS:
                    continue
                raise
            if not refused:
                return server
            self._restart_without(refused)

    def _restart_without(self, refused: Mapping[str, str]) -> None:
        """End the server; the next server does not import the refused packages.

        Raises:
            WarmUnavailableError: If one of them is essential, or there were too many restarts.
        """
        self.retire()
        self._restarts += 1
        essential = {"torch", "deepspeed", "numpy"} & refused.keys()
        if essential or self._restarts > _RESTARTS:
            name = sorted(essential or refused)[0]
            raise WarmUnavailableError(f"{name} cannot be imported before a fork: {refused[name]}")
        self._preload = replace(self._preload, left_out=tuple(sorted({*self._preload.left_out, *refused})))

    def close(self) -> None:
        """End all servers, including all forked launches."""
        for server in (self._server, *self._retired):
            if server is not None:
                server.close()
        self._server = None
        self._retired.clear()
