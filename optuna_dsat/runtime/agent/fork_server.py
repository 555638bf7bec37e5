"""The fork server of warm launches: imports the shared modules of all launches once, and forks an agent per launch.

    python -P -u -m optuna_dsat.runtime.agent.fork_server CONTROL_FD TUNER_PID

It has a single thread, computes nothing and uses no device. Over its control socket it receives lines of JSON,
``{"do": "preload", ...}`` and ``{"do": "launch", ...}``, and sends the events ``ready``, ``started`` (or ``refused``)
and ``ended`` (``launch/warm/server.py`` is the other end). It ends with the tuner. It adopts orphans of a killed agent
and ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
from collections.abc import Mapping
from typing import Any

from optuna_dsat.runtime.agent import torchrun
from optuna_dsat.runtime.agent.cuda import driver_is_initialised
from optuna_dsat.runtime.agent.forked import ParentState, become_agent, can_fork, fork_child, forked_ranks
from optuna_dsat.runtime.agent.preload import Preload, load
from optuna_dsat.runtime.agent.processes import (
    ProcessKey,
    adopt_orphans,
    die_with_parent,
    end_children,
    own_children,
    take_mark,
)


class _ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._partial = b""
        self._started_with = dict(os.environ)
        self._parent_state: ParentState | None = None
        self._of_imports: set[ProcessKey] = set()
        self._agents: dict[int, ProcessKey] = {}

    def run(self) -> None:
        """Serve until the tuner closes its end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._reap(key)
                elif not self._receive():
                    return

    def _receive(self) -> bool:
        data = self._control.recv(1 << 20)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._serve(json.loads(line))
        return bool(data)

    def _serve(self, order: Mapping[str, Any]) -> None:
        if order["do"] == "preload":
            self._preload(order)
        else:
            self._launch(order)

    def _send(self, **event: Any) -> None:
        self._control.sendall(json.dumps(event).encode() + b"\n")

    def _preload(self, order: Mapping[str, Any]) -> None:
        # Count GPUs through NVML, because a query to the driver would make forks unusable. DeepSpeed sets the same
        # variable when imported.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        loaded = load(Preload.from_json(order["preload"]), watched=frozenset(order["watched"]))
        self._of_imports |= own_children() - {*self._agents.values()}
        descriptors = [self._control.fileno(), self._selector.fileno()]
        self._parent_state = ParentState.capture(without=descriptors, started_with=self._started_with)
        self._send(
            event="ready",
            refused=loaded.refused,
            read=sorted(loaded.read),
        )

    def _launch(self, order: Mapping[str, Any]) -> None:
        parent_state = self._parent_state
        if parent_state is None:
            raise RuntimeError("a launch was ordered before the preload")
        if driver_is_initialised():
            self._send(
                event="refused", launch_id=order["launch_id"], why="something that was imported initialised CUDA"
            )
            return
        server = os.getpid()
        pid = fork_child(lambda reopened: self._become_agent(order, parent_state, reopened, parent=server))
        self._agents[pid] = ProcessKey.of(pid) or ProcessKey(pid, 0)  # it may have ended
        descriptor = os.pidfd_open(pid)
        self._selector.register(descriptor, selectors.EVENT_READ, (order["launch_id"], pid))
        self._send(event="started", launch_id=order["launch_id"], pid=pid)

    def _become_agent(
        self, order: Mapping[str, Any], parent_state: ParentState, reopened: frozenset[int], *, parent: int
    ) -> None:
        def run() -> int:
            take_mark(order["mark"])
            with forked_ranks(parent_state):
                return torchrun.main([order["record"], str(parent), *order["arguments"]])

        become_agent(
            run,
            parent_state=parent_state,
            reopened=reopened,
            environ=order["environ"],
            cwd=order["cwd"],
            log=order["log"],
        )

    def _reap(self, key: selectors.SelectorKey) -> None:
        launch_id, pid = key.data
        self._selector.unregister(key.fileobj)
        os.close(key.fd)
        _, status = os.waitpid(pid, 0)
        self._agents.pop(pid, None)
        end_children(but=self._of_imports | {*self._agents.values()})
        self._send(event="ended", launch_id=launch_id, exit_code=os.waitstatus_to_exitcode(status))


def main(argv: list[str]) -> int:
    """Serve the tuner at the other end of the socket; return the exit code."""
    control, tuner = socket.socket(fileno=int(argv[0])), int(argv[1])
    die_with_parent(tuner)
    if not can_fork():
        sys.exit("Warm launches need pidfds: a system of Linux 5.3 or newer, and a Python built for that.")
    adopt_orphans()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the tuner is gone
        _ForkServer(control).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
