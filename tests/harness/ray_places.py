"""``python -m tests.harness.ray_places ADDRESS SCENARIO``: a process that holds places in a Ray cluster.

Prints what it saw as one line of JSON. It is a process of its own because Ray leaves threads in a driver.
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
from optuna_dsat.launch.places import ray_control, ray_place
from optuna_dsat.launch.places.engine import ClusterError, Place, PlaceState
from optuna_dsat.launch.places.ray_engine import RayEngine

LIMIT_S = 90.0
Seen = dict[str, Any]


def until(engine: RayEngine, what: Callable[[], bool], limit_s: float = LIMIT_S) -> float:
    """Take news until something holds; return the seconds that took."""
    begun = time.monotonic()
    while not what():
        if time.monotonic() - begun > limit_s:
            raise TimeoutError(f"not within {limit_s} s")
        engine.news(0.2)
    return time.monotonic() - begun


def greeted(engine: RayEngine, place: Place) -> list[str]:
    """Wait until a place of two nodes is ready; return their names, by the hello that each agent says once."""
    names: dict[int, str] = {}
    begun = time.monotonic()
    while len(names) < 2 or place.state is not PlaceState.READY:
        assert place.state is not PlaceState.LOST, place.why
        assert time.monotonic() - begun < LIMIT_S, place.why
        names |= {one.node: one.message["name"] for one in engine.news(0.2) if one.message["news"] == "hello"}
    return [names[node] for node in sorted(names)]


def ready(engine: RayEngine, place: Place) -> list[int]:
    """Wait until a place is ready; return the processes of its agents by node."""
    return [agent_of(node, name) for node, name in enumerate(greeted(engine, place))]


def agent_of(node: int, name: str) -> int:
    """Return the process of a node's agent."""
    (pid,) = (
        one.pid for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[-2:] == [str(node), name]
    )
    return pid


def lives(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def refused(engine: RayEngine) -> Seen:
    """What can never be granted."""
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
    """Two places where there is room for one."""
    first, second = (engine.request(nodes=2, slots=2) for _ in range(2))
    pids = ready(engine, first)
    until(engine, lambda: bool(second.why))
    found: Seen = {"state": second.state, "why": second.why, "name": second.name}
    engine.order(first, {"do": "ping", "number": 7}, node=1)
    expected = {(1, False), (1, True)}  # to this order, and to the engine's own, which tells the clock
    pongs: set[tuple[int, bool]] = set()
    begun = time.monotonic()
    while not expected <= pongs:  # by hand: `until` takes news of its own, and this order is answered once
        assert time.monotonic() - begun < LIMIT_S, pongs
        said = [(one.node, one.message) for one in engine.news(0.2) if one.message["news"] == "pong"]
        pongs |= {(node, isinstance(pong["sent"], float)) for node, pong in said}
    engine.release(first)
    found["granted_s"] = until(engine, lambda: second.state is PlaceState.READY)
    return {**found, "first": first.state, "left": [pid for pid in pids if lives(pid)]}


def pinned(engine: RayEngine) -> Seen:
    """Places on nodes that are named, in two orders, and on one that is not there."""
    import ray

    engine.check(nodes=2, slots=2)
    fit = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")][:2]
    names = [f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in fit]
    found: Seen = {}
    for order, asked in (("forwards", names), ("backwards", names[::-1])):
        own = RayEngine(sys.argv[1], names=asked)
        own.check(nodes=2, slots=2)
        on = greeted(own, own.request(nodes=2, slots=2))
        found[order] = {"asked": asked, "on": on}
        own.close()
    try:
        RayEngine(sys.argv[1], names=["elsewhere"]).check(nodes=1, slots=0)
    except ClusterError as error:
        found["refused"] = str(error)
    return found


def agent_killed(engine: RayEngine) -> Seen:
    """The agent of one node is killed."""
    place = engine.request(nodes=2, slots=2)
    pids = ready(engine, place)
    os.kill(pids[0], signal.SIGKILL)
    lost_s = until(engine, lambda: place.state is PlaceState.LOST)
    gone_s = until(engine, lambda: not any(map(lives, pids)))
    return {"lost_s": lost_s, "gone_s": gone_s, "why": place.why}


def agent_frozen(engine: RayEngine) -> Seen:
    """The agent of one node stands still: Ray misses nothing."""
    place = engine.request(nodes=2, slots=2)
    pids = ready(engine, place)
    vars(ray_place)["LOST_S"] = 4.0  # only now: agents that start on a busy machine may be silent for as long
    os.kill(pids[1], signal.SIGSTOP)
    lost_s = until(engine, lambda: place.state is PlaceState.LOST)
    gone_s = until(engine, lambda: not any(map(lives, pids)))
    return {"lost_s": lost_s, "gone_s": gone_s, "why": place.why}


def raylet_killed(engine: RayEngine, raylet: int) -> Seen:
    """Ray's own process of one node is killed."""
    import ray

    def living() -> int:
        return sum(node["Alive"] for node in ray.nodes())

    place = engine.request(nodes=2, slots=2)
    pids, before = ready(engine, place), living()
    os.kill(raylet, signal.SIGKILL)
    lost_s = until(engine, lambda: place.state is PlaceState.LOST)
    gone_s = until(engine, lambda: not any(map(lives, pids)))
    until(engine, lambda: living() < before)
    time.sleep(2)  # Ray itself has missed the node, and would say so
    return {"lost_s": lost_s, "gone_s": gone_s, "why": place.why}


def control_frozen(engine: RayEngine, control: int) -> Seen:
    """Ray's control service stands still."""
    place = engine.request(nodes=2, slots=2)
    pids = ready(engine, place)
    ray_control._SILENT_S = 8.0  # only now: it is busy while agents start; longer than a look and its answer may take
    os.kill(control, signal.SIGSTOP)
    found: Seen = {"lost_s": until(engine, lambda: place.state is PlaceState.LOST), "why": place.why}
    found["gone_s"] = until(engine, lambda: not any(map(lives, pids)))
    try:
        engine.request(nodes=2, slots=2)
    except DeviceError as error:
        found["refused"] = str(error)
    return found


def held(engine: RayEngine) -> Seen:
    """Hold a place until this process is killed."""
    place = engine.request(nodes=2, slots=2)
    sys.stdout.write(json.dumps({"pids": ready(engine, place)}) + "\n")
    sys.stdout.flush()
    until(engine, lambda: False)
    return {}


def main() -> None:
    """Run a scenario."""
    engine = RayEngine(sys.argv[1])
    try:
        scenario: Callable[..., Seen] = globals()[sys.argv[2]]
        found = scenario(engine, *map(int, sys.argv[3:]))
    finally:
        engine.close()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
