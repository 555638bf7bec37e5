"""What a place of a cluster costs, beside one launch on this machine: times of places, orders, events and stops.

    python -m benchmarks.cluster [--launches 5] [--json results.json]      # as root: a SLURM of this machine alone
    SLURM_CONF=/etc/slurm/slurm.conf python -m benchmarks.cluster --slurm-arg=--partition=debug      # your own
    python -m benchmarks.cluster --on ray [--ray-address HOST:PORT]      # the same in a Ray cluster

Times in seconds, medians and the largest:

- place: from the request until all agents of two nodes have spoken;
- order: from an order to its answer;
- event: from a rank's write to the head's reading of it;
- launch here, launch there: from the order to the first event of a rank, forked, with the same imports ready;
- stop: from the head's order until it knows that no process is left;
- release: until the cluster has the nodes back;
- queued: from the release of the only place until the next one, queued meanwhile, is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from optuna_dsat.cluster.engine import Engine, Place, PlaceState
from optuna_dsat.cluster.launcher import ClusterLauncher, Limits
from optuna_dsat.cluster.places import Layout
from optuna_dsat.cluster.ray_engine import RayEngine
from optuna_dsat.cluster.slurm import SlurmEngine
from optuna_dsat.launch.devices import cpu_devices
from optuna_dsat.launch.protocol import Finished, Launcher, LaunchRequest, Observed, ScriptCommand
from optuna_dsat.launch.torchrun import TorchrunLauncher
from optuna_dsat.runtime.events import Event
from tests.harness.ray_cluster import LOOPBACK, running_ray, why_no_ray
from tests.harness.slurm import running_slurm, why_no_slurm

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "tiny_launch.py"
CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
Times = dict[str, list[float]]
_EVENTS = 20
"""Events of a launch after which it is stopped."""


def _request(folder: Path, number: int, *, step_s: float) -> LaunchRequest:
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    return LaunchRequest(
        launch_id=f"launch-{number}",
        purpose="trial",
        command=ScriptCommand(
            script=str(SCRIPT),
            args=(str(config), "--step-s", str(step_s)),
            cwd=str(folder),
            config_path=str(config),
        ),
        ds_config=CONFIG,
        overlay={},
        slots=2,
        start_profile_step=2,
        end_profile_step=20,
    )


def _follow(launcher: Launcher, name: str, on_event: Callable[[Event], None]) -> None:
    while True:
        for update in launcher.poll(0.01):
            if isinstance(update, Observed):
                on_event(update.event)
            elif isinstance(update, Finished) and update.launch_id == name:
                return


@dataclass(kw_only=True)
class _Watched:
    """One launch, stopped once it has written some events."""

    launcher: Launcher
    name: str
    begun: float = field(default_factory=time.monotonic)
    delays_s: list[float] = field(default_factory=list)
    first: float = 0.0
    stopped: float = 0.0

    def note(self, event: Event) -> None:
        """Take an event."""
        self.delays_s.append(time.time() - event.time)
        self.first = self.first or time.monotonic()
        if len(self.delays_s) == _EVENTS:
            self.stopped = time.monotonic()
            self.launcher.stop(self.name)


def _launches(launcher: Launcher, folder: Path, count: int, times: Times, *, where: str) -> None:
    """Launch again and again, and stop each once it trains; the first, which imports, is left out."""
    for number in range(count + 1):
        request = _request(folder, number, step_s=0.05)
        watched = _Watched(launcher=launcher, name=request.launch_id)
        launcher.start(request)
        _follow(launcher, request.launch_id, watched.note)
        if number:
            times.setdefault(f"launch {where}", []).append(watched.first - watched.begun)
            times.setdefault(f"event {where}", []).extend(watched.delays_s)
            times.setdefault(f"stop {where}", []).append(time.monotonic() - watched.stopped)


def _wait_ready(engine: Engine, place: Place) -> None:
    while place.state is PlaceState.QUEUED:
        engine.news(0.01)
    if place.state is PlaceState.LOST:
        raise SystemExit(f"{place.name} was lost: {place.why}")


def _places(engine: SlurmEngine | RayEngine, count: int, times: Times) -> None:
    """Ask for places of two nodes, talk to their agents, and give them back."""
    for _ in range(count):
        begun = time.monotonic()
        place = engine.request(nodes=2, slots=0)
        _wait_ready(engine, place)
        times.setdefault("place", []).append(time.monotonic() - begun)
        for _ in range(20):
            begun = time.monotonic()
            engine.order(place, {"do": "nothing"}, node=0)
            while not any(news.message["news"] == "unknown" for news in engine.news(1.0)):
                pass
            times.setdefault("order", []).append(time.monotonic() - begun)
        begun = time.monotonic()
        engine.release(place)
        while engine.held:
            engine.news(0.01)
        times.setdefault("release", []).append(time.monotonic() - begun)


def _queue(engine: SlurmEngine | RayEngine, room: int, count: int, times: Times) -> None:
    """Ask for one place more than there is room for, and release one of the others."""
    held = [engine.request(nodes=2, slots=2) for _ in range(room)]
    for place in held:
        _wait_ready(engine, place)
    for _ in range(count):
        held.append(engine.request(nodes=2, slots=2))
        while not held[-1].why:
            engine.news(0.01)
        print(f"{held[-1].name} is {held[-1].state} ({held[-1].why})", file=sys.stderr)
        begun = time.monotonic()
        engine.release(held.pop(0))
        _wait_ready(engine, held[-1])
        times.setdefault("queued", []).append(time.monotonic() - begun)
    for place in held:
        engine.release(place)


def measure(new_engine: Callable[[], SlurmEngine | RayEngine], launches: int, folder: Path, *, room: int) -> Times:
    """Return name of a time -> its measurements.

    Args:
        new_engine: Makes an engine.
        launches: How often each is measured.
        folder: For run directories.
        room: Places of two nodes with two GPUs each that the cluster has room for; 0 not to try the queue.
    """
    times: Times = {}
    engine = new_engine()
    try:
        engine.check(nodes=2, slots=0)
        _places(engine, launches, times)
        if room:
            _queue(engine, room, launches, times)
    finally:
        engine.close()
    layout = Layout(nodes=2, slots=1, kind="cpu", gpus=0)
    there = ClusterLauncher(
        folder / "there", engine=new_engine(), layout=layout, limits=Limits(), files={}, on_notice=print
    )
    here = TorchrunLauncher(folder / "here", devices=cpu_devices(2), warm=True, on_notice=print)
    for launcher, where in ((there, "there"), (here, "here")):
        try:
            _launches(launcher, folder, launches, times, where=where)
        finally:
            launcher.close()
    return times


@contextlib.contextmanager
def _slurm(folder: Path) -> Iterator[int]:
    """Use the SLURM that the environment names, else one of this machine's own; yield its room."""
    if "SLURM_CONF" in os.environ:
        yield 0
        return
    if why := why_no_slurm():
        raise SystemExit(why)
    with running_slurm(folder) as cluster:
        os.environ.update(cluster.environ)
        yield 2


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[tuple[str, int]]:
    """Use a given Ray cluster, else one of this machine's own; yield its address and room."""
    if address is not None:
        yield address, 0
        return
    if why := why_no_ray():
        raise SystemExit(why)
    os.environ.update(LOOPBACK)
    with running_ray() as cluster:
        yield cluster.address, 1


def _measured(options: argparse.Namespace, slurm: Path, folder: Path) -> Times:
    if options.on == "ray":
        with _ray(options.ray_address) as (address, room):
            return measure(lambda: RayEngine(address), options.launches, folder, room=room)
    with _slurm(slurm) as room:
        return measure(lambda: SlurmEngine(options.slurm_arg), options.launches, folder, room=room)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--on", choices=("slurm", "ray"), default="slurm")
    parser.add_argument("--ray-address")
    parser.add_argument("--slurm-arg", action="append", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as slurm, tempfile.TemporaryDirectory() as folder:
        times = _measured(options, Path(slurm), Path(folder))
    print(f"{os.cpu_count()} cores, load {load:.1f} at the start, Python {platform.python_version()}")
    print("| what | median s | largest s | measured |\n|---|---|---|---|")
    for name, found in times.items():
        print(f"| {name} | {statistics.median(found):.4f} | {max(found):.4f} | {len(found)} |")
    if options.json is not None:
        options.json.write_text(json.dumps({"load": load, "times": times}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
