"""Places and launches on a real SLURM of four nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.places import cluster
from optuna_dsat.launch.places import slurm as slurm_module
from optuna_dsat.launch.places.cluster import Limits
from optuna_dsat.launch.places.engine import ClusterError, Place, PlaceState
from optuna_dsat.launch.places.slurm import SlurmEngine, srun_command
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import StepMeasured
from optuna_dsat.runtime.user_code import stacks_path
from tests.cluster.launches import finish, launcher_on, poll_until, stub
from tests.harness.launches import (
    AheadClock,
    events,
    updates_until,
)
from tests.harness.slurm import SlurmCluster
from tests.harness.waits import assert_within, wait_until

RELEASE_S = 5.0
"""Longest time from a release until a place that waited for it is ready, on a machine with nothing else to do."""


@pytest.fixture
def engine(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmEngine]:
    monkeypatch.setattr(slurm_module, "_REASON_S", 0.2)
    monkeypatch.setattr(cluster, "_QUIET_S", 0.2)
    engine = SlurmEngine(())
    yield engine
    engine.close()
    wait_until(lambda: not slurm.tasks(), what="no agent and no rank is left")
    wait_until(lambda: not slurm.jobs, what="no job is left")
    wait_until(lambda: slurm.idle() == slurm.nodes, what="all nodes are idle")


def until(engine: SlurmEngine, condition: Callable[[], bool], *, what: str) -> None:
    def holds() -> bool:
        engine.news(0.0)
        return condition()

    wait_until(holds, what=what)


@pytest.fixture
def launcher(engine: SlurmEngine, tmp_path: Path) -> Iterator[TorchrunLauncher]:
    launcher = launcher_on(engine, tmp_path)
    yield launcher
    launcher.close()


def test_ranks_on_nodes_that_stand_still_are_located(
    launcher: TorchrunLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.start(stub(tmp_path, "still", "--end", "sleep", "--at", "3"))
    updates_until(launcher, lambda seen: len(events(seen, StepMeasured)) == 4)
    clock = AheadClock(monkeypatch)
    files = [stacks_path(tmp_path / "out" / "still" / "logs", rank) for rank in (0, 1)]

    def written() -> list[int]:
        return [file.stat().st_size if file.exists() else 0 for file in files]

    def have_grown(before: list[int], _: object) -> bool:
        return all(map(int.__gt__, written(), before))

    for _ in range(2):  # half of the shortest limit each time
        grown = partial(have_grown, written())
        clock.ahead_s += 15.0
        updates_until(launcher, grown)
    clock.ahead_s += 15.0
    report = finish(launcher)
    assert report.outcome is Outcome.STALLED
    for rank in (0, 1):
        assert re.search(rf"rank {rank} is in end at line \d+ of stub_engine.py", report.message)


@pytest.mark.parametrize(("nodes", "gpus", "arguments"), [(5, 0, ()), (2, 3, ()), (1, 0, ("--partition=none",))])
def test_what_can_never_be_granted_is_refused_at_once(
    slurm: SlurmCluster, nodes: int, gpus: int, arguments: tuple[str, ...]
) -> None:
    engine = SlurmEngine(arguments)
    with pytest.raises(ClusterError, match="SLURM cannot grant"):
        engine.check(nodes=nodes, slots=gpus)
    SlurmEngine(()).check(nodes=4, slots=2)
    assert not slurm.jobs


def test_a_place_that_does_not_fit_waits_with_the_schedulers_reason(engine: SlurmEngine) -> None:
    places = [engine.request(nodes=2, slots=2) for _ in range(3)]

    def ready() -> list[Place]:
        return [place for place in places if place.state is PlaceState.READY]

    until(engine, lambda: len(ready()) == 2, what="two places are ready")
    (third,) = [place for place in places if place not in ready()]
    until(engine, lambda: third.why == "Resources", what="the scheduler's reason is known")
    assert third.state is PlaceState.QUEUED
    begun = time.monotonic()
    engine.release(ready()[0])
    until(engine, lambda: third.state is PlaceState.READY, what="the third place is ready")
    took_s = time.monotonic() - begun
    assert_within(took_s, 2 * RELEASE_S)


def test_who_searches_is_told_why_a_launch_waits_and_it_starts_once_there_is_room(
    slurm: SlurmCluster, engine: SlurmEngine, tmp_path: Path
) -> None:
    words: list[str] = []
    limits = Limits(places=3)
    launcher = launcher_on(engine, tmp_path, limits=limits, on_notice=words.append)
    somebodys = subprocess.Popen(["srun", "--nodes=2", "--gpus-per-node=2", "sleep", "300"], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: slurm.idle() == 2, what="somebody else has two nodes")
        for number in range(2):
            launcher.start(stub(tmp_path, f"trial-{number:04d}", "--end", "sleep"))
        running = poll_until(launcher, lambda seen: len(seen) == 2, what="one of them runs")
        poll_until(launcher, lambda _: any("(Resources)" in line for line in words), what="the reason is told")
        (line,) = [line for line in words if "(Resources)" in line]
        assert re.fullmatch(r"Waiting for 2 nodes: SLURM job \d+ is queued \(Resources\)\.", line)
        somebodys.terminate()
        both = poll_until(launcher, lambda seen: len(seen) == 2, what="the other one runs, too")
        assert {item.launch_id for item in running} | {item.launch_id for item in both} == {"trial-0000", "trial-0001"}
    finally:
        somebodys.terminate()
        somebodys.wait()
        launcher.close()


def test_a_queued_place_is_taken_back(engine: SlurmEngine, slurm: SlurmCluster) -> None:
    held = engine.request(nodes=4, slots=2)
    until(engine, lambda: held.state is PlaceState.READY, what="one is held")
    queued = engine.request(nodes=1, slots=2)
    until(engine, lambda: bool(queued.why), what="one is queued")
    engine.release(queued)
    wait_until(lambda: len(slurm.jobs) == 1, what="the queued job is gone")


@pytest.mark.torchrun
def test_a_stop_ends_all_ranks_and_an_agents_end_returns_the_launch(
    slurm: SlurmCluster, launcher: TorchrunLauncher, tmp_path: Path
) -> None:
    launcher.start(stub(tmp_path, "trial-0000", "--end", "sleep"))
    poll_until(launcher, lambda seen: len(seen) == 2, what="both ranks run")
    connections = [connection for process in slurm.ranks() for connection in process.net_connections("inet")]
    listening = {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    assert listening, "torchrun's store"
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
    begun = time.monotonic()
    launcher.stop("trial-0000", message="pruned")
    assert finish(launcher).outcome is Outcome.PRUNED
    wait_until(lambda: not slurm.ranks(), what="no rank is left")
    assert_within(time.monotonic() - begun, 2.0)

    launcher.start(stub(tmp_path, "trial-0001", "--end", "sleep"))
    while not slurm.ranks():
        launcher.poll(0.1)
    begun = time.monotonic()
    os.kill(slurm.agents()[0].pid, signal.SIGKILL)
    report = finish(launcher)
    assert_within(time.monotonic() - begun, 5.0)
    assert report.outcome is Outcome.KILLED
    assert "was lost" in report.message
    wait_until(lambda: not slurm.ranks(), what="no rank is left")


def test_a_node_that_falls_silent_loses_its_place(
    slurm: SlurmCluster, engine: SlurmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = engine.request(nodes=2, slots=2)
    until(engine, lambda: place.state is PlaceState.READY, what="the place is ready")
    frozen = slurm.agents()[0]
    frozen.suspend()
    try:
        with monkeypatch.context() as impatient:
            impatient.setattr(slurm_module, "LOST_S", 4.0)
            until(engine, lambda: place.state is PlaceState.LOST, what="the place is lost")
        assert "did not respond" in place.why
        assert any(name in place.why for name in ("n1", "n2", "n3", "n4"))
        again = engine.request(nodes=2, slots=2)
        until(engine, lambda: again.state is PlaceState.READY, what="a place is granted elsewhere")
    finally:
        with suppress(psutil.NoSuchProcess):  # SLURM has killed it
            frozen.resume()


def test_a_place_that_is_preempted_is_lost_and_the_next_one_comes_after_it(
    slurm: SlurmCluster, engine: SlurmEngine
) -> None:
    place = engine.request(nodes=2, slots=2)
    until(engine, lambda: place.state is PlaceState.READY, what="the place is ready")
    urgent = ["srun", "--partition=urgent", "--nodes=4", "--gpus-per-node=2", "sleep", "300"]
    with subprocess.Popen(urgent, stderr=subprocess.DEVNULL) as somebodys:
        try:
            until(engine, lambda: place.state is PlaceState.LOST, what="the place is lost")
            assert "DUE TO PREEMPTION" in place.why
            wait_until(lambda: not slurm.agents(), what="its agents are gone")
            again = engine.request(nodes=2, slots=2)
            until(engine, lambda: again.why == "Resources", what="the next one waits")
        finally:
            somebodys.terminate()
    until(engine, lambda: again.state is PlaceState.READY, what="the next one is ready")


def test_a_file_that_a_node_lacks_names_the_node(engine: SlurmEngine, tmp_path: Path) -> None:
    launcher = launcher_on(engine, tmp_path, files={str(tmp_path / "gone.py"): "digest"})
    launcher.start(stub(tmp_path))
    with pytest.raises(ClusterError, match=r"n\d cannot run the study: .*gone.py is not there"):
        finish(launcher)
    launcher.close()


def test_an_srun_that_cannot_start_its_agent_says_why(engine: SlurmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    monkeypatch.setattr(slurm_module, "srun_command", lambda **given: (it := srun_command(**given))[it.index("srun") :])
    place = engine.request(nodes=1, slots=0)
    until(engine, lambda: place.state is PlaceState.LOST, what="the place is lost")
    assert "/no/such/python" in place.why


def test_a_place_of_which_a_node_starts_no_agent_is_lost(engine: SlurmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck_on_one(**options: Any) -> list[str]:
        words = srun_command(**options)
        begin = words.index(sys.executable, words.index("srun"))
        stuck = ["sh", "-c", '[ "$SLURM_PROCID" = 0 ] || exec sleep 300; exec "$@"', "sh"]
        return [*words[:begin], *stuck, *words[begin:]]

    monkeypatch.setattr(slurm_module, "_HELLO_S", 1.0)
    monkeypatch.setattr(slurm_module, "srun_command", stuck_on_one)
    place = engine.request(nodes=2, slots=0)
    until(engine, lambda: place.state is PlaceState.LOST, what="the place is lost")
    assert place.why == "only 1 of 2 nodes started an agent within 1 s"


INSIDE = """
from optuna_dsat.launch.places.engine import ClusterError, Place, PlaceState
from optuna_dsat.launch.places.slurm import SlurmEngine

engine = SlurmEngine(())
engine.check(nodes=2, slots=1)
try:
    engine.check(nodes=3, slots=1)
except ClusterError as error:
    print(error)
place = engine.request(nodes=2, slots=1)
while place.state is PlaceState.QUEUED:
    engine.news(0.1)
print(place.state.value, place.why, sorted(place.names.values()))
engine.close()
"""


def test_inside_an_allocation_a_place_is_a_step_of_it(slurm: SlurmCluster) -> None:
    output = slurm.ask("salloc", "--quiet", "--nodes=2", "--gpus-per-node=2", sys.executable, "-c", INSIDE)
    refused, granted = output.splitlines()
    assert "the SLURM job" in refused
    assert refused.endswith("that this runs in has 2 nodes.")
    assert granted == "ready  ['n1', 'n2']"
    wait_until(lambda: not slurm.tasks() and not slurm.jobs, what="the allocation is given back")
