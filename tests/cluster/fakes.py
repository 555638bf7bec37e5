"""An engine whose nodes are scripted: it grants as many places as it has, and its agents answer at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna_dsat.launch.places.engine import News, Order, PlaceState
from optuna_dsat.runtime.events import RankFinished, RankStarted, encode_event
from optuna_dsat.version import __version__
from tests.harness.events import engine, step_of


@dataclass(eq=False, kw_only=True)
class FakePlace:
    """A place of the engine below."""

    name: str
    nodes: int
    state: PlaceState = PlaceState.QUEUED
    why: str = ""


@dataclass(kw_only=True)
class FakeEngine:
    """Grants ``room`` places at a time; launches end by themselves unless ``holds`` says otherwise."""

    room: int = 1
    holds: bool = False
    machines: Sequence[str] = ("m", "m")
    clock_ahead_s: float = 0.0
    hello: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Number of a node -> what its hello says otherwise."""
    seen: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    reached: Mapping[int, list[list[str]]] = field(default_factory=dict)
    refuses: tuple[int, ...] = ()
    """Nodes that cannot write the files of a trial that continues a launch."""
    orders: list[tuple[FakePlace, int | None, Order]] = field(default_factory=list)
    requested: int = 0
    released: list[FakePlace] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places: list[FakePlace] = []
        self._ready = 0
        self._news: list[News] = []

    def check(self, *, nodes: int, slots: int) -> None:
        """Refuse nothing."""

    def request(self, *, nodes: int, slots: int) -> FakePlace:  # noqa: ARG002 - it has as many as are asked for
        self.requested += 1
        place = FakePlace(name=f"job {self.requested}", nodes=nodes)
        self._places.append(place)
        self.grant()
        return place

    def grant(self) -> None:
        for place in [item for item in self._places if item.state is PlaceState.QUEUED]:
            if self._ready >= self.room:
                place.why = "Resources"
                continue
            place.state = PlaceState.READY
            self._ready += 1
            for node in range(place.nodes):
                own = {"name": f"n{node + 1}", "machine": self.machines[node], "version": __version__}
                self.say(place, node, {"news": "hello", **own, **self.hello.get(node, {})})

    def say(self, place: FakePlace, node: int, message: Mapping[str, Any]) -> None:
        self._news.append(News(place=place, node=node, message=message, time=time.time()))

    def order(self, place: Any, order: Order, *, node: int | None = None) -> None:
        self.orders.append((place, node, order))
        for item in range(place.nodes) if node is None else [node]:
            self._answer(place, item, order)

    def _answer(self, place: FakePlace, node: int, order: Order) -> None:
        do = order["do"]
        if do == "look":
            doors = [["10.0.0.1", 5], ["192.168.0.1", 6]] if order["listen"] else []
            base = {"news": "seen", "why": "", "versions": {"torch": "2.13"}, "doors": doors}
            base["interfaces"] = [["ib0", "192.168.0.1"]]
            self.say(place, node, {**base, **self.seen.get(node, {})})
        elif do == "reach":
            self.say(place, node, {"news": "reached", "doors": self.reached.get(node, [])})
        elif do == "port":
            self.say(place, node, {"news": "port", "launch_id": order["launch_id"], "port": 4711})
        elif do == "prepare":
            self.say(place, node, {"news": "prepared", "failed": {}})
        elif do == "launch":
            self._launch(place, node, order["request"])
        elif do == "continue":
            self._continue(place, node, order["request"])
        elif do == "dismiss":
            self._leave(place, node, order["launch_id"])
        elif do == "end" and not order["ranks_only"]:
            self._end(place, node, order["launch_id"])

    def _launch(self, place: FakePlace, node: int, request: Mapping[str, Any]) -> None:
        name = request["launch_id"]
        started = {"news": "started", "pid": 100 + node, "forked": False, "command": ["torchrun"], "time": time.time()}
        self.say(place, node, {**started, "launch_id": name})
        self._measure(place, node, request)
        if not self.holds and not request["continues"]:
            self._leave(place, node, name)

    def _continue(self, place: FakePlace, node: int, request: Mapping[str, Any]) -> None:
        name = request["launch_id"]
        if node in self.refuses:
            self.say(place, node, {"news": "failed", "launch_id": name, "why": "the disk is full"})
        else:
            self._measure(place, node, request)

    def _measure(self, place: FakePlace, node: int, request: Mapping[str, Any]) -> None:
        name, ahead = request["launch_id"], self.clock_ahead_s
        size = request["ds_config"]["train_micro_batch_size_per_gpu"]
        self._write(place, node, name, RankStarted(
            rank=node, time=time.time() + ahead, local_rank=0, world_size=2, pid=1, forked=False,
        ))  # fmt: skip
        if self.holds:
            return
        self._write(place, node, name, engine(rank=node, time=time.time() + ahead, train_micro_batch_size_per_gpu=size))
        for step in range(1, request["end_profile_step"] + 1):
            self._write(place, node, name, step_of(node, step, 0.1, size, time=time.time() + ahead))
        self._write(place, node, name, RankFinished(
            rank=node, time=time.time() + ahead, reason="profile_done", steps=request["end_profile_step"],
        ))  # fmt: skip

    def _leave(self, place: FakePlace, node: int, name: str) -> None:
        self.say(place, node, {"news": "state", "launch_id": name, "dead": [node], "agent": 0})
        self._end(place, node, name)

    def _write(self, place: FakePlace, node: int, name: str, event: Any) -> None:
        lines = [encode_event(event)]
        self.say(place, node, {"news": "events", "launch_id": name, "rank": node, "lines": lines})

    def _end(self, place: FakePlace, node: int, name: str) -> None:
        gone = {"news": "gone", "end": {"exit_codes": {}, "oom_kills": 0}}
        self.say(place, node, {**gone, "launch_id": name})
        self.say(place, node, {"news": "free", "launch_id": name, "note": ""})

    def news(self, timeout_s: float) -> list[News]:  # noqa: ARG002 - all is said at once
        news, self._news = self._news, []
        return news

    def lose(self, place: FakePlace, why: str) -> None:
        self._forget(place)
        place.state, place.why = PlaceState.LOST, why

    def release(self, place: Any) -> None:
        self.released.append(place)
        self._forget(place)

    def _forget(self, place: FakePlace) -> None:
        self._places.remove(place)
        self._ready -= place.state is PlaceState.READY
        self.grant()

    def close(self) -> None:
        self._places.clear()
