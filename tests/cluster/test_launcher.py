"""The launcher of a cluster over scripted nodes: places, queues, losses, clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.places.cluster import Limits
from optuna_dsat.launch.places.engine import ClusterError
from optuna_dsat.launch.places.place import Layout, RemoteLaunch
from optuna_dsat.launch.protocol import Conditions, Finished, LaunchReport, SlotsBusyError
from optuna_dsat.outcome import Outcome
from optuna_dsat.secrecy.references import PREFIX
from tests.cluster import launches as on_nodes
from tests.cluster.fakes import FakeEngine, FakePlace
from tests.harness.launches import DS_CONFIG, STUB, request, updates_until, updates_until_finished


def launcher_on(
    engine: FakeEngine, folder: Path, *, nodes: int = 2, on_phase: Callable[[str], None] = lambda _: None, **limits: Any
) -> tuple[TorchrunLauncher, list[str]]:
    words: list[str] = []
    launcher = on_nodes.launcher_on(
        engine,
        folder,
        layout=Layout(nodes=nodes, slots=1, kind="cpu", gpus=0),
        limits=Limits(**limits),
        environ={f"{PREFIX}API_TOKEN": "hidden"},
        on_notice=words.append,
        on_phase=on_phase,
    )
    return launcher, words


def start(launcher: TorchrunLauncher, folder: Path, *numbers: int, **changes: Any) -> None:
    for number in numbers:
        launcher.start(request(folder, launch_id=f"trial-{number:04d}", script=STUB, **changes))


def held(launcher: Any) -> Any:
    return next(iter(launcher._places._held))


def finished(launcher: TorchrunLauncher, count: int) -> list[LaunchReport]:
    return [update.report for update in updates_until_finished(launcher, count) if isinstance(update, Finished)]


def launches(engine: FakeEngine) -> list[tuple[FakePlace, int | None, Any]]:
    return [order for order in engine.orders if order[2]["do"] == "launch"]


def test_a_launch_is_ordered_on_every_node_with_its_part_of_the_rendezvous(tmp_path: Path) -> None:
    engine = FakeEngine()
    launcher, _ = launcher_on(engine, tmp_path)
    start(launcher, tmp_path, 0)
    (report,) = finished(launcher, 1)
    assert (report.outcome, report.host, report.devices) == (Outcome.MEASURED, "n1, n2", (0, 1))
    parts = [order["rendezvous"] for _, _, order in launches(engine)]
    assert [(part["node_rank"], part["nodes"], part["address"], part["port"]) for part in parts] == [
        (0, 2, "127.0.0.1", 4711),
        (1, 2, "127.0.0.1", 4711),
    ]


def test_a_place_of_one_node_needs_no_rendezvous(tmp_path: Path) -> None:
    engine = FakeEngine(machines=("m",))
    launcher, _ = launcher_on(engine, tmp_path, nodes=1)
    start(launcher, tmp_path, 0, slots=1)
    assert finished(launcher, 1)[0].host == "n1"
    assert [order["rendezvous"] for _, _, order in launches(engine)] == [None]


def test_nodes_meet_at_the_first_address_that_all_of_them_reached(tmp_path: Path) -> None:
    engine = FakeEngine(machines=("a", "b"), reached={1: [["192.168.0.1", "eth1"]]})
    launcher, _ = launcher_on(engine, tmp_path)
    start(launcher, tmp_path, 0)
    finished(launcher, 1)
    parts = [order["rendezvous"] for _, _, order in launches(engine)]
    assert {part["address"] for part in parts} == {"192.168.0.1"}
    assert [part["interface"] for part in parts] == ["ib0", "eth1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hello": {1: {"version": "0.0"}}}, r"n2 has optuna-dsat 0.0, this machine .*\. Install"),
        ({"seen": {1: {"versions": {"torch": "1.0"}}}}, r"The nodes differ in torch: n1 has 2\.13, n2 has 1\.0"),
        ({"seen": {1: {"why": "/data/train.py is not there"}}}, r"n2 cannot run the study: /data/train.py is not"),
        ({"machines": ("a", "b")}, r"n2 reaches no address of n1 \(tried: 10.0.0.1, 192.168.0.1\)"),
    ],
)
def test_a_node_that_cannot_take_part_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    launcher, _ = launcher_on(FakeEngine(**changes), tmp_path)
    start(launcher, tmp_path, 0)
    with pytest.raises(ClusterError, match=message):
        finished(launcher, 1)


def test_launches_beyond_the_places_wait_and_take_whichever_is_free_first(tmp_path: Path) -> None:
    engine = FakeEngine(room=2)
    launcher, _ = launcher_on(engine, tmp_path, places=3)
    assert launcher.total_slots == launcher.free_slots == 6
    start(launcher, tmp_path, 0, 1, 2)
    assert (launcher.free_slots, len(launcher.waiting)) == (0, 3)
    with pytest.raises(SlotsBusyError):
        start(launcher, tmp_path, 3)
    assert {report.outcome for report in finished(launcher, 3)} == {Outcome.MEASURED}
    assert engine.requested == 3
    assert len({id(place) for place, _, _ in launches(engine)}) == 2  # the third place never came
    assert [place.name for place in engine.released] == ["job 3"]
    assert launcher.free_slots == 6


def test_a_queue_is_told_with_its_reason_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optuna_dsat.launch.places.cluster._QUIET_S", 0.0)
    launcher, words = launcher_on(FakeEngine(room=0), tmp_path, queue_s=0.3)
    start(launcher, tmp_path, 0)
    with pytest.raises(DeviceError, match=r"No nodes were granted in 0.3 s .* job 1 is queued \(Resources\)"):
        finished(launcher, 1)
    assert words == ["Waiting for 2 nodes: job 1 is queued (Resources)."]
    assert all(holder.own for holder in launcher.holders())


def test_what_takes_long_before_a_launch_is_told_and_so_is_its_end(tmp_path: Path) -> None:
    engine, phases = FakeEngine(room=0), list[str]()
    launcher, text = launcher_on(engine, tmp_path, on_phase=phases.append)
    start(launcher, tmp_path, 0)
    launcher.poll(0.0)
    assert (phases, text) == ([], [])  # the scheduler has said why
    place = held(launcher)
    place.why = ""
    launcher.poll(0.0)
    assert phases == ["waiting for 2 nodes"]
    engine.holds, engine.room = True, 1
    engine.grant()
    while not launches(engine):
        launcher.poll(0.0)
    for node, words in ((0, "building cpu_adam"), (1, "building cpu_adam"), (0, ""), (1, "")):
        engine.say(place, node, {"news": "phase", "words": words})
        launcher.poll(0.0)
    assert phases[-3:] == ["", "building cpu_adam, on the cluster", ""]
    launcher.close()


def test_an_idle_place_is_given_back_and_asked_for_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    launcher, _ = launcher_on(engine, tmp_path, idle_s=0.2)
    start(launcher, tmp_path, 0)
    finished(launcher, 1)
    updates_until(launcher, lambda _: engine.released)
    assert len(engine.released) == 1
    start(launcher, tmp_path, 1)
    finished(launcher, 1)
    assert engine.requested == 2


def test_a_lost_place_ends_its_launch_as_killed_and_another_one_is_asked_for(tmp_path: Path) -> None:
    engine = FakeEngine(holds=True)
    launcher, words = launcher_on(engine, tmp_path)
    start(launcher, tmp_path, 0)
    while not launches(engine):
        launcher.poll(0.01)
    engine.lose(launches(engine)[0][0], "node n2 did not respond for 20 s")
    (report,) = finished(launcher, 1)
    assert report.outcome is Outcome.KILLED
    assert report.message == "job 1 was lost: node n2 did not respond for 20 s"
    assert words == ["Job 1 was lost: node n2 did not respond for 20 s."]
    engine.holds = False
    start(launcher, tmp_path, 1)
    assert finished(launcher, 1)[0].outcome is Outcome.MEASURED
    assert engine.requested == 2


def of_size(size: int) -> dict[str, Any]:
    overlay = {"train_micro_batch_size_per_gpu": size}
    return {"continues": True, "overlay": overlay, "ds_config": {**DS_CONFIG, **overlay}}


def test_a_place_that_is_lost_during_a_continued_trial_costs_that_trial_only(tmp_path: Path) -> None:
    engine = FakeEngine()
    launcher, _ = launcher_on(engine, tmp_path)
    start(launcher, tmp_path, 0, **of_size(4))
    first = finished(launcher, 1)[0]
    engine.holds = True
    start(launcher, tmp_path, 1, **of_size(8))
    while not any(order["do"] == "continue" for _, _, order in engine.orders):
        launcher.poll(0.01)
    engine.lose(held(launcher), "node n2 did not respond for 20 s")
    second = finished(launcher, 1)[0]
    assert (first.outcome, second.outcome, second.root) == (Outcome.MEASURED, Outcome.KILLED, "trial-0000")
    engine.holds = False
    start(launcher, tmp_path, 2, **of_size(8))
    third = finished(launcher, 1)[0]
    assert (third.outcome, third.root, engine.requested) == (Outcome.MEASURED, "", 2)


def test_a_trial_whose_place_is_lost_before_its_order_is_launched_in_another_one(tmp_path: Path) -> None:
    engine = FakeEngine()
    launcher, _ = launcher_on(engine, tmp_path)
    start(launcher, tmp_path, 0, **of_size(4))
    finished(launcher, 1)
    start(launcher, tmp_path, 1, **of_size(8))
    engine.lose(held(launcher), "node n2 did not respond for 20 s")
    second = finished(launcher, 1)[0]
    assert (second.outcome, second.root, engine.requested) == (Outcome.MEASURED, "", 2)


def test_a_node_that_cannot_continue_a_launch_ends_it_before_the_place_takes_another(tmp_path: Path) -> None:
    engine = FakeEngine(refuses=(1,))
    launcher, _ = launcher_on(engine, tmp_path)
    start(launcher, tmp_path, 0, **of_size(4))
    finished(launcher, 1)
    start(launcher, tmp_path, 1, **of_size(8))
    second = finished(launcher, 1)[0]
    assert (second.outcome, second.message) == (Outcome.KILLED, "n2 could not start it: the disk is full")
    assert [order["launch_id"] for _, _, order in engine.orders if order["do"] == "end"] == ["trial-0001"]
    start(launcher, tmp_path, 2, **of_size(8))
    assert finished(launcher, 1)[0].outcome is Outcome.MEASURED
    assert engine.requested == 1


def test_ranks_of_a_node_that_cannot_continue_a_launch_are_waited_for() -> None:
    place: Any = None
    launch = RemoteLaunch("trial-0001", place=place, nodes=1, slots=1)
    launch.ordered = True
    launch.note(0, {"news": "started", "pid": 7, "forked": False, "command": []})
    launch.note(0, {"news": "failed", "why": "the disk is full"})
    assert (launch.end, launch.release(0.0)) == (None, None)
    launch.note(0, {"news": "gone", "end": {"exit_codes": {"0": -9}, "oom_kills": 0}})
    launch.note(0, {"news": "free", "note": ""})
    assert launch.end is not None
    assert launch.release(0.0) == ""


def test_the_load_of_a_launch_is_known_before_its_processes_are_gone_and_its_power_is_that_of_all_nodes() -> None:
    """A trial finishes with its steps; conditions used to arrive with the end of its processes, too late for it."""
    launch = RemoteLaunch("trial-0001", place=MagicMock(), nodes=2, slots=2)
    quiet = Conditions(window_s=2.0, others_cpu_s=0.0, cores=2, power_w=300.0)
    launch.note(0, {"news": "conditions", "conditions": quiet.to_json()})
    assert launch.conditions == replace(quiet, power_w=None)
    busy = replace(quiet, others_cpu_s=1.0, power_w=50.0)
    launch.note(1, {"news": "conditions", "conditions": busy.to_json()})
    assert launch.conditions == replace(busy, power_w=350.0)
    launch.take_on("trial-0002", {})
    assert launch.conditions == Conditions()


def test_places_that_are_lost_again_and_again_end_the_search(tmp_path: Path) -> None:
    engine = FakeEngine(holds=True)
    launcher, _ = launcher_on(engine, tmp_path)

    def lose_one(number: int) -> None:
        start(launcher, tmp_path, number)
        while len(launches(engine)) < 2 * (number + 1):
            launcher.poll(0.01)
        engine.lose(launches(engine)[-1][0], "power")
        finished(launcher, 1)

    for number in range(3):
        lose_one(number)
    with pytest.raises(DeviceError, match="4 places were lost one after another"):
        lose_one(3)


def test_a_stop_reaches_every_node_and_one_before_the_start_needs_none(tmp_path: Path) -> None:
    engine = FakeEngine(holds=True)
    launcher, _ = launcher_on(engine, tmp_path)
    start(launcher, tmp_path, 0)
    launcher.stop("trial-0000", message="early")
    assert finished(launcher, 1)[0].outcome is Outcome.PRUNED
    assert not launches(engine)
    start(launcher, tmp_path, 1)
    while len(launches(engine)) < 2:
        launcher.poll(0.01)
    launcher.stop("trial-0001", message="late")
    assert finished(launcher, 1)[0].message == "late"
    ends = [(node, order["ranks_only"]) for _, node, order in engine.orders if order["do"] == "end"]
    assert ends == [(None, False)]


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
def test_times_of_a_node_are_moved_to_the_heads_clock(tmp_path: Path, ahead_s: float) -> None:
    engine, began = FakeEngine(clock_ahead_s=ahead_s), time.monotonic()
    launcher, _ = launcher_on(engine, tmp_path)
    launcher.poll(0.0)
    start(launcher, tmp_path, 0)
    launcher.poll(0.0)
    place = held(launcher)
    for node in (0, 1):
        engine.say(place, node, {"news": "pong", "sent": time.time(), "time": time.time() + ahead_s})
    (report,) = finished(launcher, 1)
    assert 0 <= report.startup_s + report.measured_s < 60 + time.monotonic() - began


def test_a_secret_goes_to_the_nodes_and_into_no_file(tmp_path: Path) -> None:
    engine = FakeEngine()
    launcher, _ = launcher_on(engine, tmp_path)
    start(launcher, tmp_path, 0, env={"TOKEN": f"${{{PREFIX}API_TOKEN}}"})
    finished(launcher, 1)
    assert {order["request"]["env"]["TOKEN"] for _, _, order in launches(engine)} == {"hidden"}
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if "hidden" in path.read_text(errors="replace")]
