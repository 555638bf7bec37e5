"""Places in a Ray cluster, held by the process that tunes as a driver of that cluster.

A thread talks to Ray, so that places are kept alive while nobody asks for news. Ray itself schedules, places and
queues (``launch/places/ray_place.py``). This process has to run on a node of the cluster, on one without GPUs too.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.places.engine import LOST_S, ClusterError, News, Order, Place
from optuna_dsat.launch.places.ray_control import ControlWatch, control_address, greet
from optuna_dsat.launch.places.ray_nodes import refuse_impossible
from optuna_dsat.launch.places.ray_place import RayPlace, cause_of

__all__ = ["RayEngine", "address_of", "join_cluster", "leave_cluster"]

_CONNECT_S = 30.0
"""Longest wait for Ray to take this process as a driver, once the cluster's address answers."""
_TURN_S = 0.05
"""Longest wait of the thread for an answer of Ray's."""
_CLOSE_S = 12.0
"""Longest wait for places to be given back at the end."""
_LEAVE_S = 10.0
"""Longest wait for Ray to let this process go, where its control service is gone; it takes five seconds."""
_GOODBYE_S = 5.0
"""Longest wait for agents to end then."""


class RayEngine:
    """Holds places in a Ray cluster; an ``Engine``.

    Args:
        address: ``HOST:PORT`` of the cluster's head; None or ``auto`` for what ``RAY_ADDRESS`` or this machine names.
        names: Nodes that may be used (see ``named_nodes``); all for none.
        on_notice: Called with lines for the user.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        names: Sequence[str] = (),
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._address = address_of(address)
        self._names = tuple(names)
        self._on_notice = on_notice
        self._places: list[RayPlace] = []
        self._released: list[RayPlace] = []
        self._orders: deque[tuple[RayPlace, Order, int | None]] = deque()
        self._news: deque[News] = deque()
        self._changed = threading.Condition()
        self._asked = 0
        self._suspects: dict[str, float] = {}
        """Number in Ray of a node with which a place was lost -> when, on the monotonic clock. Of the thread alone."""
        self._closing = False
        self._thread: threading.Thread | None = None
        self._control: ControlWatch | None = None
        self._failure = ""
        """Why no place can be held any more."""
        self._turned_at = 0.0
        """Monotonic time at which the thread began its present turn."""
        self._is_ours = False

    def check(self, *, nodes: int, slots: int) -> None:
        """Refuse what the cluster can never grant: Ray itself would wait for it for ever.

        Args:
            nodes: Nodes of a place.
            slots: GPUs of a node; 0 for none.

        Raises:
            ClusterError: In one line.
        """
        self._connect()
        refuse_impossible(nodes=nodes, slots=slots, names=self._names)

    def request(self, *, nodes: int, slots: int) -> Place:
        """Ask for a place; does not wait for it.

        Args:
            nodes: Nodes of the place.
            slots: GPUs of a node; 0 for none.

        Raises:
            ClusterError: If no cluster answers.
            DeviceError: If the cluster that held places answers no more.
        """
        self._connect()
        with self._changed:
            self._asked += 1
            place = RayPlace(nodes=nodes, slots=slots, number=self._asked, names=self._names, suspects=self._suspects)
            self._places.append(place)
        return place

    def order(self, place: Place, order: Order, *, node: int | None = None) -> None:
        """Send an order to one node of a place, to all for None; never waits."""
        assert isinstance(place, RayPlace)
        with self._changed:
            self._orders.append((place, order, node))

    def news(self, timeout_s: float) -> Sequence[News]:
        """Return what agents said since the last call; wait up to ``timeout_s`` for some."""
        with self._changed:
            if not self._news:
                self._changed.wait(timeout_s)
            if self._places and time.monotonic() - self._turned_at > LOST_S:
                self._fail(f"Ray gives no answer for {LOST_S:g} s")
            found = tuple(self._news)
            self._news.clear()
            return found

    def release(self, place: Place) -> None:
        """Give a place back; does not wait."""
        assert isinstance(place, RayPlace)
        with self._changed:
            self._released.append(place)

    @property
    def held(self) -> int:
        """Places that are not gone, those among them that are given back."""
        return len(self._places)

    def close(self) -> None:
        """Give back all places and wait, a few seconds at most, until they are gone."""
        with self._changed:
            self._closing = True
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            self._thread = None
        if self._control is not None:
            self._control.close()
        if self._is_ours:
            leave_cluster()
            self._is_ours = False

    def _connect(self) -> None:
        """Make this process a driver of the cluster, and start the thread.

        Raises:
            ClusterError: If Ray is not installed, or no cluster answers.
            DeviceError: If none does any more.
        """
        if self._failure:
            raise DeviceError(f"{self._failure}. Nothing is lost: resume goes on.")
        if self._thread is not None:
            return
        self._is_ours = join_cluster(self._address)
        self._control = ControlWatch(control_address())
        self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="ray places", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        """Talk to Ray until all places are gone after ``close``."""
        try:
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, nothing of it can be used any more
            with self._changed:
                self._fail(f"Ray cannot be used any more: {cause_of(error)}")

    def _leave_all(self, places: Sequence[RayPlace], why: str) -> None:
        """Have all agents end, by their actors alone; no place can be held any more."""
        import ray

        with self._changed:
            self._failure = why
        for place in places:
            place.leave(why)
        if goodbyes := [one for place in places for one in place.references()]:
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=_GOODBYE_S)
        with self._changed:
            self._fail(why)

    def _fail(self, why: str) -> None:
        """Note that Ray cannot be used any more; agents end by themselves, since nobody pings them."""
        self._failure = self._failure or why
        for place in self._places:
            place.give_up(self._failure)
        self._places.clear()
        self._changed.notify_all()

    def _turn(self) -> bool:
        """Go on with all places once; return whether there is more to do."""
        import ray

        with self._changed:
            if self._failure:
                return False
            self._turned_at = time.monotonic()
            orders, self._orders = self._orders, deque()
            released, self._released = self._released, []
            places, closing = list(self._places), self._closing
        if self._control is not None and (why := self._control.failure):
            self._leave_all(places, why)
            return False
        for place, order, node in orders:
            place.give(order, node=node)
        for place in places if closing else released:
            place.leave()
        waited = [one for place in places for one in place.references()]
        if waited:
            ray.wait(waited, num_returns=1, timeout=_TURN_S)
            ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
        else:
            ready = []
            with self._changed:
                self._changed.wait(_TURN_S)
        before = [place.state for place in places]
        said = [one for place in places for one in place.advance(ready)]
        changed = said or before != [place.state for place in places]
        with self._changed:
            self._places = [place for place in self._places if not place.is_gone]  # those asked for meanwhile, too
            self._news.extend(said)
            if changed:
                self._changed.notify_all()
            return bool(self._places) or not self._closing


def address_of(given: str | None) -> str:
    """Return the address of the cluster that is meant: the given one, ``RAY_ADDRESS``, or ``auto`` for this node's."""
    return given or os.environ.get("RAY_ADDRESS") or "auto"


def join_cluster(address: str) -> bool:
    """Make this process a driver of a running cluster; return whether it was none before.

    That is done in a thread of its own: Ray replaces the handler of SIGTERM of the main thread, and has no limit.

    Raises:
        ClusterError: If Ray is not installed, or no cluster answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("--on ray needs Ray: pip install 'optuna-dsat[ray]', here and on all nodes.")
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
        except Exception as error:  # noqa: BLE001 - told in one line, whatever Ray raises
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


def leave_cluster() -> None:
    """Be a driver no more, without a long wait for a cluster that does not answer: Ray's own way has no limit."""
    import ray

    try:
        greet(control_address())
    except OSError:
        pass
    else:
        ray.shutdown()
        return
    atexit.unregister(ray.shutdown)
    worker: Any = importlib.import_module("ray._private.worker").global_worker
    # What is left undone of Ray's threads would crash this process at its end, and hide its exit code.
    thread = threading.Thread(target=worker.core_worker.shutdown_driver, daemon=True)
    thread.start()
    thread.join(_LEAVE_S)


def _silence_ray() -> None:
    """Keep Ray from writing to this process's streams.

    It warns that it replaces no handler, and writes what becomes of any node of the cluster to standard output,
    whatever ``log_to_driver`` says: results go there, and a place that is lost says why.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    worker: Any = importlib.import_module("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _reach(address: str) -> None:
    """Refuse an address that does not answer: Ray tries it for minutes.

    Raises:
        ClusterError: If nothing listens there.
    """
    if "://" in address:
        raise ClusterError(f"--ray-address is {address}; give HOST:PORT of the cluster's head.")
    try:
        greet(address)
    except (OSError, ValueError) as error:
        raise ClusterError(f"--ray-address is {address}, where no Ray cluster answers: {error}.") from None
