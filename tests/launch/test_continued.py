"""Launches that measure several trials in a running engine, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.errors import ScriptFailedError
from optuna_dsat.launch.launcher import TorchrunLauncher, _changes_for, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import EngineReady, StepMeasured
from optuna_dsat.runtime.measure.live import order_next
from optuna_dsat.runtime.overlay import MICRO_BATCH
from tests.harness.launches import DS_CONFIG, events, reports, request, updates_until, updates_until_finished

from .test_torchrun import assert_gone

pytestmark = pytest.mark.torchrun

PIPELINE = Path(__file__).parents[2] / "examples" / "pipeline" / "train.py"
Run = Callable[..., tuple[LaunchReport, list[StepMeasured]]]


@pytest.fixture
def launcher(warm_launcher: TorchrunLauncher, notices: list[str]) -> Iterator[TorchrunLauncher]:
    notices.clear()
    warm_launcher._continues, warm_launcher._not_followed = True, set()
    yield warm_launcher
    for name in [*warm_launcher._running]:  # of a test that has failed
        warm_launcher.stop(name, outcome=Outcome.LOST)
    deadline = time.monotonic() + 20
    while warm_launcher.free_slots < 2 and time.monotonic() < deadline:
        warm_launcher.poll(0.1)


@pytest.fixture
def run(launcher: TorchrunLauncher, tmp_path: Path) -> Run:
    (tmp_path / "user_config.json").write_text(json.dumps(DS_CONFIG))

    def measure(name: str, *args: str, size: int = 4, **changes: Any) -> tuple[LaunchReport, list[StepMeasured]]:
        asked = trial(tmp_path, name, *args, size=size, **changes)
        launcher.start(asked)
        updates = updates_until_finished(launcher)
        return reports(updates)[asked.launch_id], events(updates, StepMeasured)

    return measure


def trial(folder: Path, name: str, *args: str, size: int = 4, **changes: Any) -> LaunchRequest:
    overlay = {"train_micro_batch_size_per_gpu": size, **changes.pop("config", {})}
    name = f"{folder.name.strip('_')}-{name}"
    fields: dict[str, Any] = {
        "overlay": overlay,
        "ds_config": {**DS_CONFIG, **overlay},
        "continues": True,
        "stall_s": 90,
    }
    return request(folder, launch_id=name, script="continued.py", args=args, **fields | changes)


def sizes(steps: list[StepMeasured]) -> set[int | None]:
    return {step.observed_micro_batch for step in steps}


@pytest.mark.parametrize("data", ["loader", "stream", "batches"])
@pytest.mark.parametrize("workers", [0, 2])
def test_sizes_are_measured_in_one_launch(run: Run, launcher: TorchrunLauncher, data: str, workers: int) -> None:
    options = ("--data", data, "--workers", str(workers))
    first, _ = run("first", *options)
    descriptors = Path(f"/proc/{first.pids[-1]}/fd")
    before = len([*descriptors.iterdir()])
    for size in (9, 2, 4):
        report, steps = run(f"size-{size}", *options, size=size)
        assert report.outcome is Outcome.MEASURED, (report.message, report.error_excerpt, report.command)
        assert report.root == first.launch_id
        assert report.pids == first.pids
        assert sizes(steps) == {size}
        assert [step.step for step in steps if step.rank == 0] == [1, 2, 3]
        record = launcher.run_directory(report.launch_id)
        assert record.stdout(0).exists()
        assert json.loads(record.report.read_text())["root"] == first.launch_id
        assert workers or len([*descriptors.iterdir()]) == before
    run("other", *options, config={"zero_optimization": {"stage": 1}})
    assert_gone(first.pids)


def test_stages_of_a_pipeline_send_their_shapes_anew(launcher: TorchrunLauncher, tmp_path: Path) -> None:
    """Its loader has workers: some steps still have the earlier size."""
    (tmp_path / "user_config.json").write_text(json.dumps(DS_CONFIG))
    reported: list[LaunchReport] = []
    for size, steps in ((1, 1), (8, 2), (2, 4)):
        asked = trial(tmp_path, f"size-{size}", size=size, config={"gradient_accumulation_steps": steps})
        command = replace(asked.command, script=str(PIPELINE), args=("--deepspeed_config", asked.command.config_path))
        launcher.start(replace(asked, command=command))
        updates = updates_until_finished(launcher)
        reported += reports(updates).values()
        measured = events(updates, StepMeasured)
        assert sizes(measured) == {size}
        assert {step.samples for step in measured} == {size * steps}
    assert [report.outcome for report in reported] == [Outcome.MEASURED] * 3
    assert [report.root for report in reported] == ["", *[reported[0].launch_id] * 2]


def test_a_request_that_does_not_continue_is_launched(run: Run) -> None:
    first, _ = run("first")
    other, _ = run("other", size=8, continues=False)
    third, _ = run("third", size=2)
    assert other.root == third.root == ""
    assert_gone([*first.pids, *other.pids])


def test_ranks_leave_when_nothing_continues_them(run: Run, launcher: TorchrunLauncher) -> None:
    first, _ = run("first")
    deadline = time.monotonic() + 10
    while launcher._parked and time.monotonic() < deadline:
        launcher.poll(0.1)
    assert_gone(first.pids)
    assert launcher.free_slots == 2


def test_accumulation_follows_where_the_engine_counts(run: Run) -> None:
    first, _ = run("first")
    report, steps = run("second", config={"gradient_accumulation_steps": 3})
    assert report.root == first.launch_id
    assert {step.samples for step in steps} == {12}


def test_inputs_that_a_script_makes_once_are_repeated(run: Run) -> None:
    first, _ = run("first", "--data", "once")
    for size in (8, 3, 4):
        report, steps = run(f"size-{size}", "--data", "once", size=size)
        assert (report.outcome, report.root, sizes(steps)) == (Outcome.MEASURED, first.launch_id, {size})


@pytest.mark.parametrize("options", [["--data", "labels"], ["--data", "once", "--epochs", "4"]])
def test_what_fails_in_a_running_engine_is_launched(run: Run, launcher: TorchrunLauncher, options: list[str]) -> None:
    run("first", *options)
    refused, _ = run("second", *options, size=8)
    short = "--epochs" in options  # the script's steps suffice for one trial alone
    assert (refused.afresh, refused.outcome is Outcome.OUT_OF_DATA, launcher._continues) == (True, short, not short)
    again, steps = run("again", *options, size=8)
    assert (again.outcome, again.root, sizes(steps)) == (Outcome.MEASURED, "", {8})


def test_a_script_that_does_not_follow_is_launched_afresh(run: Run, notices: list[str]) -> None:
    run("first", "--data", "fixed")
    refused, _ = run("second", "--data", "fixed", size=8, config={"gradient_accumulation_steps": 2})
    assert refused.afresh
    assert refused.outcome is Outcome.SCRIPT_ERROR
    again, steps = run("again", "--data", "fixed", size=8)
    assert (again.root, again.afresh, sizes(steps)) == ("", False, {8})
    assert any("Trials with another train_micro_batch_size_per_gpu are launched one by one" in n for n in notices)
    other, _ = run("knob", "--data", "fixed", size=2)
    assert other.root == "", "what the script did not follow is not tried again"


def test_a_setting_that_an_engine_refuses_by_name_is_not_changed_again(tmp_path: Path) -> None:
    """The micro-batch, which changed as well, was then no longer changed in running engines."""
    notices: list[str] = []
    made = local_launcher(tmp_path, devices=cpu_devices(2), base_env={}, warm=False, on_notice=notices.append)
    refused = "zero_optimization.reduce_scatter"
    made._learn_limit({MICRO_BATCH: 8, refused: False}, "a mixture of experts needs reduce_scatter")
    assert made._not_followed == {refused}
    assert notices == [
        f"Trials with another {refused} are launched one by one, as one in a running engine failed: a mixture of "
        "experts needs reduce_scatter."
    ]


def test_a_loader_that_never_reaches_the_size_is_launched_afresh(run: Run) -> None:
    first, _ = run("first", "--data", "cut")
    refused, steps = run("second", "--data", "cut", size=8)
    assert (refused.outcome, refused.root, refused.afresh) == (Outcome.SCRIPT_ERROR, first.launch_id, True)
    assert "the batch size is 4, not 8" in refused.message
    assert not steps
    assert_gone(first.pids)
    again, steps = run("again", "--data", "cut", size=8)
    assert (again.outcome, again.root, sizes(steps)) == (Outcome.MEASURED, "", {8})


def test_a_script_that_accumulates_by_itself_is_launched_afresh(run: Run) -> None:
    run("first", "--accumulates")
    refused, _ = run("second", "--accumulates", config={"gradient_accumulation_steps": 3})
    assert refused.afresh
    size, _ = run("third", "--accumulates", size=8)
    assert size.root == "", "the launch before has failed"
    more, _ = run("fourth", "--accumulates", size=2)
    assert more.root == size.launch_id, "a size is followed"


@pytest.mark.parametrize(("fed", "continues"), [({4}, True), ({4, 9}, False), ({None}, False)])
def test_batches_that_the_script_makes_are_continued_only_where_all_have_the_size(
    tmp_path: Path, fed: set[int | None], continues: bool
) -> None:
    """Batches of the profile launch of a token budget were cut to the user's micro-batch."""
    profile, wanted = (trial(tmp_path, name, size=size) for name, size in (("profile", 1), ("first", 4)))
    wanted = replace(wanted, command=replace(wanted.command, batch_source={"kind": "held"}))
    running: Any = SimpleNamespace(request=profile, log=SimpleNamespace(micro_batches=fed))
    assert (_changes_for(running, wanted) == {"train_micro_batch_size_per_gpu": 4}) is continues


def test_an_error_at_a_size_is_not_blamed_on_it(run: Run) -> None:
    run("first", "--end", "raise", "--end-size", "8")
    failed, _ = run("second", "--end", "raise", "--end-size", "8", size=8)
    assert failed.afresh
    assert "this size is not for me" in failed.error_excerpt
    alone, _ = run("alone", "--end", "raise", "--end-size", "8", size=8)
    assert (alone.outcome, alone.afresh) == (Outcome.SCRIPT_ERROR, False)


def test_out_of_memory_ends_the_launch_and_counts(run: Run) -> None:
    first, _ = run("first", "--end", "memory", "--end-size", "8")
    full, _ = run("second", "--end", "memory", "--end-size", "8", size=8)
    assert (full.outcome, full.root, full.afresh) == (Outcome.OUT_OF_MEMORY, first.launch_id, False)
    assert_gone(first.pids)
    third, _ = run("third", size=2)
    assert third.root == ""


def test_data_that_do_not_last_are_measured_in_an_own_launch(run: Run) -> None:
    run("first", "--samples", "16")
    refused, _ = run("second", "--samples", "16", size=32)
    assert refused.afresh
    again, _ = run("again", "--samples", "16", size=32)
    assert not again.afresh


def test_a_rank_that_dies_while_it_waits_costs_nothing(run: Run, launcher: TorchrunLauncher) -> None:
    first, _ = run("first")
    os.kill(first.pids[-1], signal.SIGKILL)
    time.sleep(0.5)
    second, steps = run("second", size=8)
    assert (second.outcome, second.afresh) == (Outcome.MEASURED, False)
    assert (second.root, sizes(steps)) == ("", {8})
    assert_gone(first.pids)
    assert launcher.free_slots == 2


def test_ranks_that_have_left_a_tuner_that_stood_still_cost_nothing(run: Run, launcher: TorchrunLauncher) -> None:
    first, _ = run("first")
    order_next(launcher.run_directory(first.launch_id).root, None)  # as after the longest wait
    time.sleep(0.5)
    second, steps = run("second", size=8)
    assert (second.outcome, second.root, second.afresh, sizes(steps)) == (Outcome.MEASURED, "", False, {8})
    assert_gone(first.pids)


@pytest.mark.parametrize(("number", "outcome"), [(signal.SIGKILL, Outcome.KILLED), (signal.SIGSTOP, Outcome.STALLED)])
def test_a_rank_that_fails_after_steps_of_a_continued_trial_costs_this_trial_only(
    run: Run, launcher: TorchrunLauncher, tmp_path: Path, number: signal.Signals, outcome: Outcome
) -> None:
    first, _ = run("first")
    asked = trial(tmp_path, "second", size=8, end_profile_step=10_000, stall_s=3)
    launcher.start(asked)
    updates_until(launcher, lambda seen: events(seen, StepMeasured))
    os.kill(first.pids[-1], number)
    failed = reports(updates_until_finished(launcher))[asked.launch_id]
    assert (failed.outcome, failed.root) == (outcome, first.launch_id)
    assert failed.afresh == (outcome is Outcome.STALLED), "a killed launch is repeated by the tuner"
    assert_gone(first.pids)
    again, _ = run("again", size=8)
    more, _ = run("more", size=2)
    assert (again.root, more.root) == ("", again.launch_id), "sizes are followed as before"


def test_a_rank_that_stands_still_is_found(run: Run) -> None:
    first, _ = run("first", "--end", "sleep", "--end-size", "8", stall_s=3)
    stalled, _ = run("second", "--end", "sleep", "--end-size", "8", size=8, stall_s=3)
    assert (stalled.outcome, stalled.afresh) == (Outcome.STALLED, True)
    assert_gone(first.pids)


def test_a_rank_that_is_stopped_between_two_trials_is_found(run: Run, launcher: TorchrunLauncher) -> None:
    first, _ = run("first", stall_s=3)
    os.kill(first.pids[-1], signal.SIGSTOP)
    stalled, _ = run("second", size=8, stall_s=3)
    assert (stalled.outcome, stalled.afresh) == (Outcome.STALLED, True)
    assert_gone(first.pids)
    assert launcher.free_slots == 2


def test_a_pruned_trial_leaves_its_ranks_to_the_next(launcher: TorchrunLauncher, tmp_path: Path) -> None:
    (tmp_path / "user_config.json").write_text(json.dumps(DS_CONFIG))
    asked = trial(tmp_path, "first", end_profile_step=6)
    launcher.start(asked)
    updates_until(launcher, lambda seen: events(seen, StepMeasured))
    launcher.stop(asked.launch_id)
    report = reports(updates_until_finished(launcher))[asked.launch_id]
    assert report.outcome is Outcome.PRUNED
    launcher.start(trial(tmp_path, "second", size=8))
    second = reports(updates_until_finished(launcher))
    assert [each.root for each in second.values()] == [asked.launch_id]


def test_the_profile_goes_on_with_the_baseline(run: Run, launcher: TorchrunLauncher, tmp_path: Path) -> None:
    (tmp_path / "user_config.json").write_text(json.dumps(DS_CONFIG))
    asked = replace(trial(tmp_path, "profile", size=1), purpose="profile")
    launcher.start(asked)
    assert reports(updates_until_finished(launcher))[asked.launch_id].outcome is Outcome.MEASURED
    report, steps = run("baseline", size=4)
    assert report.root == asked.launch_id
    assert sizes(steps) == {4}


def test_a_profile_that_changed_the_users_files_goes_on_with_nothing(
    launcher: TorchrunLauncher, tmp_path: Path
) -> None:
    """Without overlays a subprocess writes past the redirection, which the profile launch shows."""
    (tmp_path / "user_config.json").write_text(json.dumps(DS_CONFIG))
    options = ("--touch", str(tmp_path / "made.txt"))
    launcher.start(replace(trial(tmp_path, "profile", *options, isolation="python"), purpose="profile"))
    updates_until_finished(launcher)
    baseline = trial(tmp_path, "baseline", *options, size=8, isolation="python")
    launcher.start(baseline)
    with pytest.raises(ScriptFailedError, match=r"changed .*made\.txt"):
        updates_until_finished(launcher)
    launcher.stop(baseline.launch_id)
    assert [*reports(updates_until_finished(launcher))] == [baseline.launch_id]


def test_what_is_ordered_can_be_stopped(launcher: TorchrunLauncher, tmp_path: Path) -> None:
    (tmp_path / "user_config.json").write_text(json.dumps(DS_CONFIG))
    first, second = (trial(tmp_path, name, size=size) for name, size in (("first", 4), ("second", 8)))
    launcher.start(first)
    updates_until_finished(launcher)
    launcher.start(second)
    launcher.stop(second.launch_id)
    assert reports(updates_until_finished(launcher))[second.launch_id].outcome is Outcome.PRUNED
    launcher.start(trial(tmp_path, "third", size=2))
    updates = updates_until_finished(launcher)
    assert {step.observed_micro_batch for step in events(updates, StepMeasured)} == {2}
    assert {event.train_micro_batch_size_per_gpu for event in events(updates, EngineReady)} == {2}
