"""The agent of a node: runs launches for a head as the launcher does on a single machine.

Commands and messages are JSON objects with their kind in ``do`` and ``news``:

    (none)    -> hello     identity: names, version, machine
    ping      -> pong      the node's time, for its clock offset
    look      -> seen      devices and files required by a study, and which are missing; node 0 starts to listen
    reach     -> reached   addresses of node 0 that answer from here
    port      -> port      a free port on this node
                 phase     a slow activity here; empty at its end
    prepare   -> prepared  imports before a fork, compiled operators
    launch    -> started, then events, log, state and usage, then gone and free; or failed
    continue               has the ranks of a launch measure another trial, whose name the messages then have
    dismiss                has ranks that wait for another trial leave
    end       -> gone      kills a launch (``ranks_only``: all but torchrun)
    leave                  ends everything

Nodes reach each other by addresses: host names are never resolved, as nodes often cannot.

All calls come from a single thread, which lives as long as the launches: the kernel ends them with it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from optuna_dsat.errors import DsatError
from optuna_dsat.launch.agent.command import device_environment
from optuna_dsat.launch.agent.files import HEARD_S
from optuna_dsat.launch.agent.run import Machine, MachineLaunch, NodeLaunch
from optuna_dsat.launch.machine.devices import Devices, cpu_devices, detect_devices
from optuna_dsat.launch.machine.host import available_memory_bytes
from optuna_dsat.launch.machine.journal import LeftoverWatch, TunerNotes
from optuna_dsat.launch.machine.operators import BuildWatch, compile_operators
from optuna_dsat.launch.machine.slots import SlotPool
from optuna_dsat.launch.protocol import SlotsBusyError
from optuna_dsat.launch.warm.forking import IMPORTING, Forking
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.process_identity import process_space
from optuna_dsat.script.interpreter import usable
from optuna_dsat.version import __version__

_REACH_S = 3.0
"""Longest wait for a connection."""


def addresses() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) pairs of this machine, without loopback addresses."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    result = [
        (name, address.address)
        for name, all_ in psutil.net_if_addrs().items()
        for address in all_
        if address.family == socket.AF_INET and name in up and not address.address.startswith("127.")
    ]
    return sorted(result, key=lambda pair: pair[0].startswith(("docker", "virbr", "br-", "veth")))


def interface_of(address: str) -> str:
    """Return the interface with this address; empty without one."""
    for name, all_ in psutil.net_if_addrs().items():
        if any(item.address == address for item in all_):
            return name
    return ""


def free_port(address: str) -> int:
    """Return an unused port of this machine."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


class Doorbell:
    """Listens on addresses of this machine, so that other nodes can test whether they reach them."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._stack = ExitStack()
        self.open: list[tuple[str, int]] = []
        """(address, port) of each listening socket."""
        for address in addresses:
            with suppress(OSError):
                server = self._stack.enter_context(socket.create_server((address, 0)))
                self.open.append((address, int(server.getsockname()[1])))

    def close(self) -> None:
        """Stop listening."""
        self._stack.close()


def reached(doors: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
    """Return (address, local interface) for each of another node's addresses that accepts a connection."""
    result = []
    for address, port in doors:
        with suppress(OSError), socket.create_connection((address, port), timeout=_REACH_S) as connection:
            result.append((address, interface_of(connection.getsockname()[0])))
    return result


def digest_of(path: Path) -> str:
    """Return a digest of a file's content; ``folder`` for a folder, empty if missing."""
    if path.is_dir():
        return "folder"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


class NodeAgent:
    """Runs launches on this node as commanded by a head. The first message is its hello."""

    def __init__(
        self,
        *,
        node: int,
        name: str,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._environ = dict(os.environ if environ is None else environ)
        self._clock = clock
        self._heard = clock()
        self._left = False
        self._news: deque[dict[str, Any]] = deque()  # a compiling thread appends to it, too
        self._notes = TunerNotes(Path.cwd())
        self._machine: Machine | None = None
        self._python = sys.executable
        """Interpreter of the launches."""
        self._launches: dict[str, NodeLaunch] = {}
        self._doors: Doorbell | None = None
        self._compiling: threading.Thread | None = None
        self._phases: dict[str, str] = {}
        """Slow activity by its source."""
        self._told_phase = ""
        self._builds = BuildWatch(self._environ, on_phase=partial(self._phases.__setitem__, "builds"))
        self._say(
            "hello",
            name=name,
            machine=process_space("net"),  # equal on nodes that share a loopback address
            job=self._environ.get("SLURM_JOB_ID"),
            version=__version__,
        )

    @property
    def leaving(self) -> bool:
        """Whether this process should exit: on request, or because the head has been silent for too long."""
        return self._left or self._clock() - self._heard > HEARD_S

    def take(self, order: Mapping[str, Any]) -> None:
        """Carry out a command, or start to."""
        self._heard = self._clock()
        actions: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "ping": self._ping,
            "look": self._look,
            "reach": self._reach,
            "port": self._port,
            "prepare": self._prepare,
            "launch": self._launch,
            "continue": self._continue,
            "dismiss": self._dismiss,
            "stacks": self._stacks,
            "end": self._end,
            "leave": self._leave,
        }
        actions[order["do"]](order)

    def advance(self) -> list[dict[str, Any]]:
        """Advance all launches; return the messages since the last call."""
        now = time.monotonic()
        for launch in list(self._launches.values()):
            self._news.extend(launch.advance(now))
            if launch.ended:
                del self._launches[launch.name]
        self._look_at_phases()
        return [self._news.popleft() for _ in range(len(self._news))]

    def _look_at_phases(self) -> None:
        launches = list(self._launches.values())
        (self._builds.check if launches else self._builds.end)()
        self._phases["imports"] = IMPORTING if any(launch.is_importing for launch in launches) else ""
        phase = next(filter(None, list(self._phases.values())), "")
        if phase != self._told_phase:
            self._told_phase = phase
            self._say("phase", words=phase)

    def close(self) -> None:
        """End everything, and wait for its end."""
        for launch in self._launches.values():
            launch.end()
        for launch in self._launches.values():
            launch.close()
        self._launches.clear()
        if self._machine is not None:
            self._machine.forking.close()
        if self._doors is not None:
            self._doors.close()
        self._notes.close()

    def _say(self, kind: str, **content: Any) -> None:
        self._news.append({"news": kind, **content})

    def _ping(self, order: Mapping[str, Any]) -> None:
        self._say("pong", sent=order.get("sent"), time=time.time())

    def _leave(self, _order: Mapping[str, Any]) -> None:
        self._left = True

    def _look(self, order: Mapping[str, Any]) -> None:
        """Check devices and files; ``why`` in the message describes missing items."""
        files = {path: digest for path, digest in order["files"].items() if digest_of(Path(path)) != digest}
        why, libraries = "", dict[str, str]()
        self._python = order["python"] or sys.executable
        try:
            libraries = usable(self._python).all_versions
            LeftoverWatch(self._environ, on_notice=self._notice).begin()
            self._machine = self._machine_of(self._devices(order["kind"], order["slots"]))
        except (DsatError, TimeoutError) as error:
            why = str(error)
        gone = [path for path in files if digest_of(Path(path)) == ""]
        if gone:
            why = f"{gone[0]} is not there"
        elif files:
            why = f"{next(iter(files))} is not the file that the head has"
        if order.get("listen") and self._doors is None:
            self._doors = Doorbell([address for _, address in addresses()])
        self._say(
            "seen",
            why=why,
            versions=libraries,
            doors=[] if self._doors is None else self._doors.open,
            interfaces=addresses() if order.get("listen") else [],
        )

    def _devices(self, kind: str, slots: int) -> Devices:
        """Return the devices of a launch on this node.

        Raises:
            DeviceError, UsageError: If there are too few, or they do not answer.
        """
        if kind == "cpu":
            return cpu_devices(slots)
        devices = detect_devices(environ=self._environ)
        if devices.kind != kind or devices.per_launch < slots:
            seen = devices.per_launch if devices.kind == kind else 0
            reasons = "".join(f" {notice}" for notice in devices.notices)
            raise DsatError(f"it shows {seen} GPU{'s' * (seen != 1)} of the {slots} that a launch takes.{reasons}")
        return devices

    def _machine_of(self, devices: Devices) -> Machine:
        log = self._notes.begin().with_name("warm.log")
        return Machine(
            node=self._node,
            pool=SlotPool(devices, on_notice=self._notice),
            environ=self._environ,
            forking=Forking(log, enabled=True, on_notice=self._notice),
            new_folder=self._new_folder,
            cpu_memory_bytes=available_memory_bytes() * 3 // 4 // len(devices.devices),
        )

    def _new_folder(self) -> tuple[Path, Path]:
        leavings = self._notes.begin()
        return leavings.with_suffix(""), leavings  # in the journal, so removed at the next start if killed

    def _notice(self, text: str) -> None:
        self._say("notice", text=text)

    def _reach(self, order: Mapping[str, Any]) -> None:
        self._say("reached", doors=reached([(str(address), int(port)) for address, port in order["doors"]]))

    def _port(self, order: Mapping[str, Any]) -> None:
        self._say("port", launch_id=order["launch_id"], port=free_port(order["address"]))

    def _prepare(self, order: Mapping[str, Any]) -> None:
        """Set the modules to import before forks, and compile operators in the background."""
        machine = self._machine
        if machine is None:
            return
        machine.forking.prepare(Preload.from_json(order["preload"]))
        kind, builders = machine.pool.kind, list(order["operators"])
        enter = partial(self._phases.__setitem__, "operators")

        def compile_all() -> None:
            environ = device_environment(self._environ, kind=kind, python=self._python)
            failed = compile_operators(builders, environ, python=self._python, on_phase=enter)
            self._say("prepared", failed=failed)

        if builders:
            self._compiling = threading.Thread(target=compile_all, name="compile", daemon=True)
            self._compiling.start()
        else:
            self._say("prepared", failed={})

    def _launch(self, order: Mapping[str, Any]) -> None:
        name = str(order["request"]["launch_id"])
        if self._machine is None:
            self._say("failed", launch_id=name, why="no devices were found")
            return
        try:
            self._launches[name] = NodeLaunch(order, machine=self._machine)
        except (DsatError, SlotsBusyError, OSError) as error:
            self._say("failed", launch_id=name, why=str(error))

    def _continue(self, order: Mapping[str, Any]) -> None:
        launch = self._launches.pop(order["launch_id"], None)
        if launch is None:
            return
        try:
            launch.take_on(order)
        except DsatError as error:
            self._say("failed", launch_id=order["request"]["launch_id"], why=str(error))
            launch.end()
        self._launches[launch.name] = launch

    def _dismiss(self, order: Mapping[str, Any]) -> None:
        if (processes := self._processes_of(order)) is not None:
            processes.leave()

    def _stacks(self, order: Mapping[str, Any]) -> None:
        if (processes := self._processes_of(order)) is not None:
            processes.ask_for_stacks()

    def _end(self, order: Mapping[str, Any]) -> None:
        if not order.get("ranks_only"):
            if (launch := self._launches.get(order["launch_id"])) is not None:
                launch.end()
        elif (processes := self._processes_of(order)) is not None:
            processes.kill_ranks()

    def _processes_of(self, order: Mapping[str, Any]) -> MachineLaunch | None:
        launch = self._launches.get(order["launch_id"])
        return None if launch is None else launch.processes
