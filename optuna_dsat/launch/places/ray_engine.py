"""Allocations in a Ray cluster, held by the tuning process as a driver of the cluster.

A thread talks to Ray, so that allocations are kept alive while nobody calls ``news``. Scheduling, placement and
queueing are left to Ray (``launch/places/ray_place.py``). This process must run on a node of the cluster, which may be
a node without GPUs.

Ray's calls wait without limit if the cluster's control service (GCS) is gone, and cannot be interrupted. So the service
is watched alongside: it speaks gRPC, and answers an HTTP/2 connection preface (RFC 9113, 3.4).
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from optuna_dsat.escape.shell import install_command
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.places.engine import LOST_S, ClusterError, News, Order, Place
from optuna_dsat.launch.places.ray_nodes import refuse_impossible
from optuna_dsat.launch.places.ray_place import RayPlace, cause_of

_SILENT_S = 30.0
"""Time without an answer after which the service counts as gone. Actors continue without it, but after 60 s Ray ends
the driver process in the middle of its work (``gcs_rpc_server_reconnect_timeout_s``)."""
_LOOK_S = 3.0
"""Interval between greetings."""
_ANSWER_S = 3.0
"""Longest wait for an answer."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""HTTP/2 connection preface of a client, with an empty SETTINGS frame."""


class ControlWatch:
    """Watches a control service at ``HOST:PORT`` in a background thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._answered_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray control", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Message that the service is gone; empty while it answers."""
        silent = time.monotonic() - self._answered_at > _SILENT_S
        return f"Ray's control service (GCS) has given no answer for {_SILENT_S:g} s" if silent else ""

    def close(self) -> None:
        """Stop watching; the daemon thread may still wait for an answer."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with suppress(OSError):
                greet(self._address)
                self._answered_at = time.monotonic()


def control_address() -> str:
    """Return the address of the control service of this driver's cluster."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def greet(address: str) -> None:
    """Wait up to ``_ANSWER_S`` for a control service to answer; a TLS service answers by closing the connection.

    Raises:
        OSError: If it does not answer.
        ValueError: If the address is invalid.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S)
    with connection, suppress(ConnectionError):
        connection.sendall(_GREETING)
        connection.recv(1)


_CONNECT_S = 30.0
"""Longest wait for Ray to accept this process as a driver, once the cluster's address answers."""
_TURN_S = 0.05
"""Longest wait of the thread for an answer of Ray."""
_CLOSE_S = 12.0
"""Longest wait for the release of allocations at the end."""
_LEAVE_S = 10.0
"""Longest wait for Ray to disconnect if its control service is gone; it takes five seconds."""


class RayEngine:
    """Holds allocations in a Ray cluster; an ``Engine``.

    ``address`` is ``HOST:PORT`` of the cluster's head; None or ``auto`` for ``RAY_ADDRESS`` or this machine's cluster.
    ``names`` are the nodes that may be used (see ``named_nodes``); all for none.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        names: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        self._address = address_of(address)
        self._names = tuple(names)
        self._python = python
        self._places: list[RayPlace] = []
        self._released: list[RayPlace] = []
        self._orders: deque[tuple[RayPlace, Order, int | None]] = deque()
        self._news: deque[News] = deque()
        self._changed = threading.Condition()
        self._asked = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._control: ControlWatch | None = None
        self._failure = ""
        """Why no allocation can be held any more."""
        self._turned_at = 0.0
        """Monotonic time at which the thread began its current turn."""
        self._is_ours = False

    def check(self, *, nodes: int, slots: int) -> None:
        """Raise if the cluster can never grant such an allocation: Ray itself would wait forever."""
        self._connect()
        refuse_impossible(nodes=nodes, slots=slots, names=self._names)

    def request(self, *, nodes: int, slots: int) -> Place:
        """Request an allocation without waiting.

        Raises:
            ClusterError: If no cluster answers.
            DeviceError: If the cluster that held allocations no longer answers.
        """
        self._connect()
        with self._changed:
            self._asked += 1
            place = RayPlace(nodes=nodes, slots=slots, number=self._asked, names=self._names, python=self._python)
            self._places.append(place)
        return place

    def order(self, place: Place, order: Order, *, node: int | None = None) -> None:
        """Send a command to a node, or to all nodes for None; never waits."""
        assert isinstance(place, RayPlace)
        with self._changed:
            self._orders.append((place, order, node))

    def news(self, timeout_s: float) -> Sequence[News]:
        """Return messages of agents since the last call; wait up to ``timeout_s`` for some."""
        with self._changed:
            if not self._news:
                self._changed.wait(timeout_s)
            if self._places and time.monotonic() - self._turned_at > LOST_S:
                self._fail(f"Ray gives no answer for {LOST_S:g} s")
            events = tuple(self._news)
            self._news.clear()
            return events

    def release(self, place: Place) -> None:
        """Release an allocation without waiting."""
        assert isinstance(place, RayPlace)
        with self._changed:
            self._released.append(place)

    def close(self) -> None:
        """Release all allocations and wait, a few seconds at most, until they are gone."""
        with self._changed:
            self._closing = True
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            self._thread = None
        if self._control is not None:
            self._control.close()
        if self._is_ours:
            leave_cluster(answers=not (self._control and self._control.failure))
            self._is_ours = False

    def _connect(self) -> None:
        """Make this process a driver of the cluster, and start the thread."""
        if self._failure:
            raise DeviceError(f"{self._failure}. Nothing is lost: resume continues.")
        if self._thread is not None:
            return
        self._is_ours = join_cluster(self._address)
        self._control = ControlWatch(control_address())
        self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="ray places", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        """Talk to Ray until ``close`` was called and all allocations are gone."""
        try:
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - any error of Ray makes it unusable
            with self._changed:
                self._fail(f"Ray cannot be used any more: {cause_of(error)}")

    def _fail(self, why: str) -> None:
        """Record that Ray can no longer be used. Agents exit because they receive no more pings."""
        self._failure = self._failure or why
        for place in self._places:
            place.give_up(self._failure)
        self._places.clear()
        self._changed.notify_all()

    def _turn(self) -> bool:
        """Advance all allocations; return whether there is more to do."""
        import ray

        with self._changed:
            if self._failure:
                return False
            self._turned_at = time.monotonic()
            orders, self._orders = self._orders, deque()
            released, self._released = self._released, []
            places, closing = list(self._places), self._closing
            if self._control is not None and (why := self._control.failure):
                self._fail(why)
                return False
        for place, order, node in orders:
            place.give(order, node=node)
        for place in places if closing else released:
            place.leave()
        waited = [reference for place in places for reference in place.references()]
        if waited:
            ray.wait(waited, num_returns=1, timeout=_TURN_S)
            ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
        else:
            ready = []
            with self._changed:
                self._changed.wait(_TURN_S)
        before = [place.state for place in places]
        messages = [item for place in places for item in place.advance(ready)]
        changed = messages or before != [place.state for place in places]
        with self._changed:
            self._places = [place for place in self._places if not place.is_gone]  # includes requests made meanwhile
            self._news.extend(messages)
            if changed:
                self._changed.notify_all()
            return bool(self._places) or not self._closing


def address_of(given: str | None) -> str:
    """Return the address of the cluster: the given address, ``RAY_ADDRESS``, or ``auto`` for this node's cluster."""
    return given or os.environ.get("RAY_ADDRESS") or "auto"


def join_cluster(address: str) -> bool:
    """Make this process a driver of a running cluster; return False if it already was a driver.

    Runs in a separate thread, because Ray replaces the main thread's SIGTERM handler and may wait without limit.

    Raises:
        ClusterError: If Ray is not installed, or no cluster answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ClusterError(f"--on ray needs Ray: {install_command('optuna-dsat[ray]')}, here and on all nodes.")
    if address != "auto":
        _reach(address)
    import ray

    if ray.is_initialized():
        return False
    host = address.rpartition(":")[0]
    local = {"_node_ip_address": host} if host.startswith("127.") else {}
    failed: list[BaseException] = []

    def join() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False, **local)
        except Exception as error:  # noqa: BLE001 - any error of Ray is reported in one line
            failed.append(error)

    _silence_ray()
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    named = f"--ray-address {address}" if address != "auto" else "no --ray-address is given"
    if thread.is_alive():
        atexit.unregister(ray.shutdown)  # it would wait for this thread
        raise ClusterError(f"The Ray cluster took no driver within {_CONNECT_S:.0f} s ({named}).")
    if failed:
        first = next((line for line in str(failed[0]).splitlines() if line.strip()), type(failed[0]).__name__)
        raise ClusterError(f"No Ray cluster can be used ({named}): {first.strip()}")
    return True


def leave_cluster(*, answers: bool = True) -> None:
    """Disconnect this driver without a long wait if the cluster does not answer; Ray's shutdown has no time limit."""
    import ray

    with suppress(OSError):
        if answers:
            greet(control_address())
            ray.shutdown()
            return
    atexit.unregister(ray.shutdown)
    worker: Any = importlib.import_module("ray._private.worker").global_worker
    # Ray threads that still run would crash this process at exit and hide its exit code.
    thread = threading.Thread(target=worker.core_worker.shutdown_driver, daemon=True)
    thread.start()
    thread.join(_LEAVE_S)


def _silence_ray() -> None:
    """Keep Ray from writing to this process's streams.

    It reports failures of any node on standard output, which is for results, despite ``log_to_driver``.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    worker: Any = importlib.import_module("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _reach(address: str) -> None:
    """Fail fast if the address does not respond; Ray itself would retry for minutes."""
    if "://" in address:
        raise ClusterError(f"--ray-address is {address}; give HOST:PORT of the cluster's head.")
    try:
        greet(address)
    except (OSError, ValueError) as error:
        raise ClusterError(f"--ray-address is {address}, where no Ray cluster answers: {error}.") from None
