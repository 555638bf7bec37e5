"""Warm launches: the tuner's end of ``launch/warm_process.py``.

A process that has imported torch, DeepSpeed and whatever else the script was seen to import forks torchrun's agent for
each launch, and the agent forks the ranks. What a launch costs beside its steps is then mostly the script's own.
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

from optuna_dsat.launch.command import RANK_VARIABLES, TRACKER_FOLDERS
from optuna_dsat.launch.preload import Preload
from optuna_dsat.launch.processes import MARK_ENV, new_mark
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.runtime.launch_plan import LAUNCH_ENV

__all__ = ["WarmAgent", "WarmLaunches", "WarmOrder", "WarmUnavailableError", "can_fork"]

_PRELOAD_LIMIT_S = 300.0
"""Longest wait for the imports; a cold disk takes minutes."""

_ANSWER_LIMIT_S = 30.0
"""Longest wait for a fork."""

_RESTARTS = 5
"""Times the parent is started anew without what it must not import, or after it died."""

_PER_LAUNCH = frozenset({LAUNCH_ENV, MARK_ENV, "CUDA_VISIBLE_DEVICES", "PYTHONPATH", *TRACKER_FOLDERS})
"""What may differ between the environments of two launches of a study."""

_WATCHED = RANK_VARIABLES | TRACKER_FOLDERS
"""What no import may read before a fork. The parent's environment has none of them, so that who copies all of it is not
taken for a reader."""


class WarmUnavailableError(RuntimeError):
    """Launches cannot be forked here; the message says why. Plain torchrun takes their place."""


@dataclass(frozen=True, kw_only=True)
class WarmOrder:
    """One launch, as the parent needs it."""

    launch_id: str
    mark: str
    arguments: Sequence[str]
    """torchrun's, behind ``python -m torch.distributed.run``."""
    environ: Mapping[str, str]
    cwd: str
    directory: RunDirectory


def can_fork() -> bool:
    """Whether this platform has what warm launches need: ``/proc``, and pidfds to wait for processes."""
    return sys.platform.startswith("linux") and hasattr(os, "pidfd_open")


class WarmAgent:
    """A torchrun that the parent has forked (an ``AgentHandle``).

    Attributes:
        preload: What its ranks find imported.
    """

    def __init__(self, parent: _Parent, launch_id: str, preload: Preload) -> None:
        self._parent = parent
        self._launch_id = launch_id
        self.preload = preload
        self.pid = parent.await_start(launch_id)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Check whether it has ended; return the exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._parent.exit_code(self._launch_id)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        while (code := self.poll()) is None:
            self._parent.receive(0.1)
        return code


class _Parent:
    """The process that launches are forked from."""

    def __init__(self, environ: Mapping[str, str], log: Path) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-u", "-m", "optuna_dsat.launch.warm_process"]
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

    def order(self, **order: Any) -> None:
        """Send an order.

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
        """Take in what the process has to tell, waiting up to ``timeout_s`` for it."""
        if self._dead or not select.select([self._socket], [], [], timeout_s)[0]:
            return
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._socket.recv(1 << 20)
        self._dead = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            news = json.loads(line)
            if news["news"] == "ready":
                self._ready.append(news)
            elif news["news"] == "started":
                self._pids[news["launch_id"]] = news["pid"]
                self._running.add(news["launch_id"])
            elif news["news"] == "refused":
                self._refusals[news["launch_id"]] = news["why"]
            else:
                self._codes[news["launch_id"]] = news["exit_code"]
                self._running.discard(news["launch_id"])

    def await_ready(self) -> Mapping[str, Any]:
        """Wait for the end of the imports and return what came of them.

        Raises:
            WarmUnavailableError: If the process ended, or takes too long.
        """
        self._await(lambda: bool(self._ready), _PRELOAD_LIMIT_S)
        return self._ready.pop(0)

    def await_start(self, launch_id: str) -> int:
        """Wait until a launch was forked and return its process number.

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
                raise WarmUnavailableError(
                    f"the process that launches are forked from gave no answer in {limit_s:g} s; see {self.log}"
                )
            self.receive(0.2)

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was forked from it runs."""
        self.receive(0.0)
        return self._dead or not self._running

    def exit_code(self, launch_id: str) -> int | None:
        """Return a launch's exit code, None while it runs; launches of a dead parent were killed with it."""
        self.receive(0.0)
        if launch_id in self._codes:
            return self._codes[launch_id]
        return -signal.SIGKILL if self._dead else None

    def close(self) -> None:
        """End the process, and with it all that it has forked."""
        self._socket.close()
        self._dead = True
        self.process.kill()
        self.process.wait()


class WarmLaunches:
    """Starts launches by forking; says why where it cannot.

    Args:
        log: File for what the imports print.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._parent: _Parent | None = None
        self._retired: list[_Parent] = []
        """Parents of launches in flight from which nothing more is forked."""
        self._environ: dict[str, str] = {}
        self._preload = Preload()
        self._pending = 0
        """Preloads that the parent has not answered yet."""
        self._restarts = 0
        self._read: set[str] = set()
        """Environment variables that the parent's imports have read."""
        self._proven: Preload | None = None
        """What a forked launch had imported that trained."""

    @property
    def preload(self) -> Preload:
        """What the parent imports, or has imported."""
        return self._preload

    def has_proven(self, preload: Preload) -> bool:
        """Return whether a forked launch that had this imported has trained."""
        return self._proven == preload

    def prove(self, preload: Preload) -> None:
        """Note that a forked launch with this imported has trained."""
        self._proven = preload

    def retreat(self) -> bool:
        """Go back to the modules that are proven, others having turned out to spoil forks; False if there are none."""
        if self._proven is None or self._proven == self._preload:
            return False
        self.retire()
        self._preload = self._proven
        return True

    def retire(self) -> None:
        """Fork nothing more from the present parent; it is ended once the launches that it has forked are over."""
        if self._parent is not None:
            self._retired.append(self._parent)
            self._parent = None
        for parent in [parent for parent in self._retired if parent.is_idle]:
            self._retired.remove(parent)
            parent.close()

    def wait(self) -> None:
        """Wait until the parent has imported what it can.

        Raises:
            WarmUnavailableError: If nothing can be forked from it.
        """
        self._ready_parent(self._environ)

    def prepare(self, preload: Preload) -> None:
        """Say what launches have in common; imported at once where the parent is there, else with the first launch."""
        self._preload = replace(preload, left_out=tuple(sorted({*self._preload.left_out, *preload.left_out})))
        if self._parent is not None and (self._pending or self._read & set(preload.environment)):
            self.retire()  # it has read what the script changes, or may yet: another one is watched from its start on
        elif self._parent is not None:
            self._order_preload(self._parent)

    def begin(self, environ: Mapping[str, str]) -> None:
        """Start the parent for launches in ``environ`` and let it import; does not wait.

        Raises:
            WarmUnavailableError: If this platform does not allow it.
        """
        if self._parent is not None:
            return
        if not can_fork():
            raise WarmUnavailableError("it needs Linux 5.3 or newer")
        self._environ = dict(environ)
        hidden = _WATCHED | {LAUNCH_ENV, *self._preload.environment}
        own = {name: value for name, value in environ.items() if name not in hidden}
        own[MARK_ENV] = new_mark()  # it outlives the launch whose environment this is
        self._parent = _Parent(own, self._log)
        self._pending = 0
        self._read = set()
        self._order_preload(self._parent)

    def _order_preload(self, parent: _Parent) -> None:
        parent.order(do="preload", preload=self._preload.to_json(), watched=sorted(_WATCHED))
        self._pending += 1

    def start(self, order: WarmOrder) -> WarmAgent:
        """Fork a launch; the first one waits for the imports.

        Raises:
            WarmUnavailableError: If it cannot be forked.
        """
        self.begin(order.environ)
        self._check_environment(order.environ)
        parent = self._ready_parent(order.environ)
        parent.order(
            do="launch",
            launch_id=order.launch_id,
            mark=order.mark,
            record=str(order.directory.agent_record),
            arguments=list(order.arguments),
            environ=dict(order.environ),
            cwd=order.cwd,
            log=str(order.directory.agent_log),
        )
        return WarmAgent(parent, order.launch_id, self._preload)

    def _check_environment(self, environ: Mapping[str, str]) -> None:
        changed = {
            name
            for name in (environ.keys() | self._environ.keys()) - _PER_LAUNCH
            if environ.get(name) != self._environ.get(name)
        }
        if changed:
            raise WarmUnavailableError(f"the environment of this launch differs in {', '.join(sorted(changed))}")

    def _ready_parent(self, environ: Mapping[str, str]) -> _Parent:
        while True:
            if self._parent is None:
                self.begin(environ)
            if (parent := self._parent) is None:
                raise WarmUnavailableError("there is no process to fork from")
            refused: dict[str, str] = {}
            try:
                while self._pending:
                    ready = parent.await_ready()
                    self._pending -= 1
                    refused |= ready["refused"]
                    self._read |= set(ready["read"])
            except WarmUnavailableError:
                self.close()
                raise
            if not refused:
                return parent
            self._start_anew_without(refused)

    def _start_anew_without(self, refused: Mapping[str, str]) -> None:
        """End the parent; the next one leaves to the ranks what must not be imported before a fork."""
        self.retire()
        self._restarts += 1
        essential = {"torch", "deepspeed", "numpy"} & refused.keys()
        if essential or self._restarts > _RESTARTS:
            name = sorted(essential or refused)[0]
            raise WarmUnavailableError(f"{name} cannot be imported before a fork: {refused[name]}")
        self._preload = replace(self._preload, left_out=tuple(sorted({*self._preload.left_out, *refused})))

    def close(self) -> None:
        """End the parent, and with it all launches that were forked."""
        for parent in (self._parent, *self._retired):
            if parent is not None:
                parent.close()
        self._parent = None
        self._retired.clear()
