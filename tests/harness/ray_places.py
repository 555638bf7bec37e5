"""``python -m tests.harness.ray_places ADDRESS SCENARIO,...``: a process that holds allocations of a Ray cluster.

Prints its observations as a line of JSON. It is a separate process because Ray leaves threads in a driver.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.places import ray_engine, ray_place
from optuna_dsat.launch.places.engine import ClusterError, Place, PlaceState
from optuna_dsat.launch.places.ray_engine import RayEngine
from tests.harness.waits import HANG_S, ended

Seen = dict[str, Any]


def until(engine: RayEngine, what: Callable[[], bool], limit_s: float = HANG_S) -> float:
    """Process news until a condition holds; return the seconds it took."""
    begun = time.monotonic()
    while not what():
        if time.monotonic() - begun > limit_s:
            raise TimeoutError(f"not within {limit_s} s")
        engine.news(0.2)
    return time.monotonic() - begun


def greeted(engine: RayEngine, place: Place) -> list[str]:
    """Wait until an allocation of two nodes is ready; return their names, from the ``hello`` message of each agent."""
    names: dict[int, str] = {}
    begun = time.monotonic()
    while len(names) < 2 or place.state is not PlaceState.READY:
        assert place.state is not PlaceState.LOST, place.why
        assert time.monotonic() - begun < HANG_S, place.why
        names |= {event.node: event.message["name"] for event in engine.news(0.2) if event.message["news"] == "hello"}
    return [names[node] for node in sorted(names)]


def ready(engine: RayEngine, place: Place) -> list[int]:
    """Wait until an allocation is ready; return the process numbers of its agents by node."""
    return [agent_of(node, name) for node, name in enumerate(greeted(engine, place))]


def agent_of(node: int, name: str) -> int:
    """Return the process number of a node's agent."""
    (pid,) = (
        item.pid for item in psutil.process_iter(["cmdline"]) if (item.info["cmdline"] or [])[-2:] == [str(node), name]
    )
    return pid


def loss(engine: RayEngine, place: Place, pids: list[int]) -> Seen:
    """Wait until an allocation is lost and its agents are gone; return the seconds that this took, and why it is."""
    lost_s = until(engine, lambda: place.state is PlaceState.LOST)
    return {"lost_s": lost_s, "gone_s": until(engine, lambda: all(map(ended, pids))), "why": place.why}


def refused(engine: RayEngine) -> Seen:
    """Request resources that the cluster can never grant."""
    before, answers = signal.getsignal(signal.SIGTERM), []
    for nodes, slots in ((3, 2), (1, 4), (2, 2)):
        begun = time.monotonic()
        try:
            engine.check(nodes=nodes, slots=slots)
            text = ""
        except ClusterError as error:
            text = str(error)
        answers.append((text, time.monotonic() - begun))
    return {"answers": answers, "same_handler": signal.getsignal(signal.SIGTERM) is before}


def queued(engine: RayEngine) -> Seen:
    """Request two allocations where only one fits; release the first, and kill an agent of the second."""
    first, second = (engine.request(nodes=2, slots=2) for _ in range(2))
    pids = ready(engine, first)
    until(engine, lambda: bool(second.why))
    result: Seen = {"state": second.state, "why": second.why, "name": second.name}
    engine.order(first, {"do": "ping", "number": 7}, node=1)
    expected = {(1, False), (1, True)}  # of this order, and of the engine's clock order
    pongs: set[tuple[int, bool]] = set()
    begun = time.monotonic()
    while not expected <= pongs:  # not by `until`, which would consume the news; this order is answered once
        assert time.monotonic() - begun < HANG_S, pongs
        text = [(event.node, event.message) for event in engine.news(0.2) if event.message["news"] == "pong"]
        pongs |= {(node, isinstance(pong["sent"], float)) for node, pong in text}
    engine.release(first)
    granted = ready(engine, second)
    result |= {"first": first.state, "left": [pid for pid in pids if not ended(pid)]}
    os.kill(granted[0], signal.SIGKILL)
    return {**result, "killed": loss(engine, second, granted)}


def pinned(engine: RayEngine) -> Seen:
    """Request an allocation on named nodes, in the order that Ray would not choose, and one on a missing node.

    Then stop (SIGSTOP) the agent of a node, which Ray does not notice.
    """
    import ray

    engine.check(nodes=2, slots=2)
    fit = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")][:2]
    asked = [f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in reversed(fit)]
    own = RayEngine(sys.argv[1], names=asked)
    own.check(nodes=2, slots=2)
    place = own.request(nodes=2, slots=2)
    result: Seen = {"asked": asked, "on": greeted(own, place)}
    try:
        RayEngine(sys.argv[1], names=["elsewhere"]).check(nodes=1, slots=0)
    except ClusterError as error:
        result["refused"] = str(error)
    pids = [agent_of(node, name) for node, name in enumerate(result["on"])]
    vars(ray_place)["LOST_S"] = 4.0  # only now: agents that start on a busy machine may be silent for as long
    os.kill(pids[1], signal.SIGSTOP)
    result["frozen"] = loss(own, place, pids)
    own.close()
    return result


def control_frozen(engine: RayEngine, control: int) -> Seen:
    """Stop (SIGSTOP) Ray's control service."""
    place = engine.request(nodes=2, slots=2)
    pids = ready(engine, place)
    ray_engine._SILENT_S, ray_engine._LOOK_S = 4.0, 0.5  # only now: it is busy while agents start
    os.kill(control, signal.SIGSTOP)
    result = loss(engine, place, pids)
    try:
        engine.request(nodes=2, slots=2)
    except DeviceError as error:
        result["refused"] = str(error)
    begun = time.monotonic()
    engine.close()  # while the place is still referred to, as by a search that ends
    return {**result, "closed_s": time.monotonic() - begun}


def held(engine: RayEngine) -> Seen:
    """Hold an allocation until this process is killed."""
    place = engine.request(nodes=2, slots=2)
    sys.stdout.write(json.dumps({"pids": ready(engine, place)}) + "\n")
    sys.stdout.flush()
    until(engine, lambda: False)
    return {}


def main() -> None:
    """Run scenarios, each with its own engine."""
    results = {}
    for name in sys.argv[2].split(","):
        engine = RayEngine(sys.argv[1])
        try:
            scenario: Callable[..., Seen] = globals()[name]
            results[name] = scenario(engine, *map(int, sys.argv[3:]))
        finally:
            engine.close()
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
