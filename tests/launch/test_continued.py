"""Launches that measure several trials in a running engine, on the CPU."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.errors import ScriptFailedError
from optuna_dsat.launch.event_log import END_BYTES, START_BYTES, EventLog
from optuna_dsat.launch.launcher import TorchrunLauncher, _changes_for, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import EngineReady, StepMeasured
from optuna_dsat.runtime.overlay import GRADIENT_ACCUMULATION, MICRO_BATCH
from tests.harness.events import step_of
from tests.harness.launches import (
    DS_CONFIG,
    AheadClock,
    events,
    reports,
    request,
    updates_until,
    updates_until_finished,
)
from tests.harness.waits import ended, wait_until

from .test_torchrun import assert_gone

pytestmark = pytest.mark.torchrun

PIPELINE = Path(__file__).parents[2] / "examples" / "pipeline" / "train.py"
Run = Callable[..., tuple[LaunchReport, list[StepMeasured]]]


@pytest.fixture
def launcher(warm_launcher: TorchrunLauncher, notices: list[str], tmp_path: Path) -> Iterator[TorchrunLauncher]:
    (tmp_path / "user_config.json").write_text(json.dumps(DS_CONFIG))
    notices.clear()
    warm_launcher._continues, warm_launcher._not_followed = True, set()
    yield warm_launcher
    for name in [*warm_launcher._running]:  # of a test that has failed
        warm_launcher.stop(name, outcome=Outcome.LOST)
    updates_until(warm_launcher, lambda _: warm_launcher.free_slots == 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> AheadClock:
    return AheadClock(monkeypatch)


@pytest.fixture
def run(launcher: TorchrunLauncher, tmp_path: Path) -> Run:
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


@pytest.mark.parametrize(("data", "workers"), [("loader", 2), ("stream", 0), ("batches", 2)])
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


def test_stages_of_a_pipeline_send_their_shapes_anew(launcher: TorchrunLauncher, tmp_path: Path) -> None:
    """Its loader has workers: some steps still have the earlier size."""
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


@pytest.mark.parametrize(
    ("changes", "continued"),
    [
        ({"size": 2}, True),
        ({"config": {"zero_optimization": {"stage": 1}}}, False),
        ({"size": 8, "continues": False}, False),
        ({"device_memory_bytes": 2**30}, False),
    ],
)
def test_another_structure_and_a_request_that_does_not_continue_are_launched(
    tmp_path: Path, changes: dict[str, Any], continued: bool
) -> None:
    running: Any = SimpleNamespace(request=trial(tmp_path, "first"), log=SimpleNamespace(inputs_change=False))
    assert (_changes_for(running, trial(tmp_path, "second", **changes)) is not None) is continued


def test_accumulation_follows_where_the_engine_counts_and_ranks_leave_when_nothing_continues_them(
    run: Run, launcher: TorchrunLauncher
) -> None:
    first, _ = run("first")
    log = launcher.run_directory(first.launch_id).stdout(0)
    os.truncate(log, 2 * (START_BYTES + END_BYTES))
    report, steps = run("second", config={"gradient_accumulation_steps": 3})
    assert report.root == first.launch_id
    assert log.stat().st_size < START_BYTES + END_BYTES + 1000
    assert {step.samples for step in steps} == {12}
    updates_until(launcher, lambda _: not launcher._parked)
    assert_gone(first.pids)
    assert launcher.free_slots == 2


def test_logs_of_ranks_that_wait_for_another_trial_are_shortened_at_the_end(tmp_path: Path) -> None:
    """The last trial of a search kept all that its script wrote."""
    launcher, shortened = local_launcher(tmp_path, devices=cpu_devices(1)), list[str]()
    waiting: Any = SimpleNamespace(shorten_logs=lambda: shortened.append("last"))
    launcher._parked["last"] = waiting
    launcher.close()
    assert (shortened, launcher._parked) == (["last"], {})


@pytest.mark.parametrize("stage", [1, 3])
def test_engines_that_train_in_turns_all_follow_and_the_first_stays_measured(
    run: Run, launcher: TorchrunLauncher, stage: int
) -> None:
    """Steps in transition have the earlier size: the other engine seemed to train alone, and kept its settings.

    Between two steps the first scores samples for the other, as a discriminator, but not before its own first.
    """
    zero = {"stage": stage, "reduce_bucket_size": 1000}
    single = {"start_profile_step": 1, "end_profile_step": 1}
    first, _ = run("first", "--critic", config={"zero_optimization": zero}, **single)
    config = {"gradient_accumulation_steps": 2, "zero_optimization": {**zero, "reduce_bucket_size": 2000}}
    report, steps = run("second", "--critic", size=8, config=config)
    assert (report.outcome, report.root) == (Outcome.MEASURED, first.launch_id), report.error_excerpt
    assert (sizes(steps), {step.samples for step in steps}) == ({8}, {16})
    record = launcher.run_directory(report.launch_id)
    assert record.events(0).read_text().count('"engine_ready"') == 1
    assert record.stdout(0).read_text().count("passes of the critic: 2") >= 2


def test_accumulation_follows_where_accelerate_counts(run: Run) -> None:
    """Each study launched one trial afresh, and then all of another accumulation."""
    pytest.importorskip("accelerate")
    config = {"optimizer": None, "zero_allow_untested_optimizer": True}
    first, _ = run("first", "--accelerate", "1", config={**config, "gradient_accumulation_steps": 1})
    for passes in (3, 2):
        report, steps = run(
            f"passes-{passes}", "--accelerate", "1", config={**config, "gradient_accumulation_steps": passes}
        )
        assert (report.outcome, report.root) == (Outcome.MEASURED, first.launch_id), report.error_excerpt
        assert {step.samples for step in steps} == {4 * passes}


def test_inputs_that_a_script_makes_once_are_repeated(run: Run) -> None:
    first, _ = run("first", "--data", "once")
    for size in (8, 3):
        report, steps = run(f"size-{size}", "--data", "once", size=size)
        assert (report.outcome, report.root, sizes(steps)) == (Outcome.MEASURED, first.launch_id, {size})


def test_a_script_whose_steps_suffice_for_one_trial_continues_none(run: Run, launcher: TorchrunLauncher) -> None:
    options = ("--data", "once", "--epochs", "4")
    run("first", *options)
    refused, _ = run("second", *options, size=8)
    assert (refused.afresh, refused.outcome, launcher._continues) == (True, Outcome.OUT_OF_DATA, False)
    again, steps = run("again", *options, size=8)
    assert (again.outcome, again.root, again.afresh, sizes(steps)) == (Outcome.MEASURED, "", False, {8})


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


SCATTER = "zero_optimization.reduce_scatter"


@pytest.mark.parametrize(
    ("changed", "why", "key"),
    [
        ((MICRO_BATCH, SCATTER), "a mixture of experts needs reduce_scatter", SCATTER),
        ((MICRO_BATCH, GRADIENT_ACCUMULATION), "the batch size is 4, not 8", MICRO_BATCH),
        ((MICRO_BATCH, GRADIENT_ACCUMULATION), "the passes of a step are 1, not 3", GRADIENT_ACCUMULATION),
        ((SCATTER,), "the script's own mistake", None),
    ],
)
def test_the_setting_that_explains_a_failure_is_not_changed_again(
    tmp_path: Path, changed: Sequence[str], why: str, key: str | None
) -> None:
    """The micro-batch, which changed as well, was then no longer changed in running engines."""
    notices: list[str] = []
    made = local_launcher(tmp_path, devices=cpu_devices(2), base_env={}, warm=False, on_notice=notices.append)
    made._learn_limit(dict.fromkeys(changed), why)
    assert (made._not_followed, made._continues) == ({key} - {None}, key is not None)
    what = "" if key is None else f" with another {key}"
    assert notices == [f"Trials{what} are launched one by one, as one in a running engine failed: {why}."]


@pytest.mark.parametrize(("fed", "continues"), [({4}, True), ({4, 9}, False), ({None}, False)])
def test_batches_that_the_script_makes_are_continued_only_where_all_have_the_size(
    tmp_path: Path, fed: set[int | None], continues: bool
) -> None:
    """Batches of the profile launch of a token budget were cut to the user's micro-batch."""
    profile, wanted = (trial(tmp_path, name, size=size) for name, size in (("profile", 1), ("first", 4)))
    wanted = replace(wanted, command=replace(wanted.command, batch_source={"kind": "held"}))
    running: Any = SimpleNamespace(request=profile, log=SimpleNamespace(micro_batches=fed, inputs_change=False))
    assert (_changes_for(running, wanted) == {"train_micro_batch_size_per_gpu": 4}) is continues
    running.request = wanted  # at the same size, the first steps of each launch have the same batches
    assert (_changes_for(running, wanted) == {}) is (len(fed) == 1)


@pytest.mark.parametrize(
    ("elements", "others", "continues"),
    [
        ([64, 96, 96, 128], [64, 96, 96], False),
        ([64, 96, 96, 128], [], False),
        ([64, 96], [80, 80], True),
        ([64, 96, 80, 128], [], True),
        ([64, 64, 66], [], True),
        ([96, 64], [], True),
        ([96, 32], [], True),
        ([96, 64, 32], [96, 64, 32], False),
        ([96, 64, 80], [96, 64, 80], True),
        ([96, 64, 32], [96, 80, 32], True),
        ([], [], True),
    ],
)
def test_a_launch_whose_inputs_the_script_changes_is_not_continued(
    tmp_path: Path, elements: list[int], others: list[int], continues: bool
) -> None:
    """Trials of a curriculum were compared at the lengths that it had reached, of several resolutions at any."""
    request = trial(tmp_path, "first")
    log = EventLog(RunDirectory(tmp_path), slots=1, started=0.0)
    log._steps = [
        step_of(rank=rank, step=step, elements=count)
        for rank, counts in enumerate((elements, others))
        for step, count in enumerate(counts, 1)
    ]
    running: Any = SimpleNamespace(request=request, log=log)
    assert (_changes_for(running, trial(tmp_path, "second")) is not None) is continues


def test_out_of_memory_ends_the_launch_and_counts(run: Run) -> None:
    first, _ = run("first", "--out-of-memory-size", "8")
    full, _ = run("second", "--out-of-memory-size", "8", size=8)
    assert (full.outcome, full.root, full.afresh) == (Outcome.OUT_OF_MEMORY, first.launch_id, False)
    assert_gone(first.pids)
    third, _ = run("third", size=2)
    assert third.root == ""


def test_a_rank_that_dies_while_it_waits_costs_nothing(run: Run, launcher: TorchrunLauncher) -> None:
    first, _ = run("first")
    os.kill(first.pids[-1], signal.SIGKILL)
    wait_until(lambda: ended(first.pids[0]), what="torchrun has seen it, and ended")
    second, steps = run("second", size=8)
    assert (second.outcome, second.afresh) == (Outcome.MEASURED, False)
    assert (second.root, sizes(steps)) == ("", {8})
    assert_gone(first.pids)
    assert launcher.free_slots == 2


@pytest.mark.parametrize(("number", "outcome"), [(signal.SIGKILL, Outcome.KILLED), (signal.SIGSTOP, Outcome.STALLED)])
def test_a_rank_that_fails_after_steps_of_a_continued_trial_costs_this_trial_only(
    run: Run, launcher: TorchrunLauncher, clock: AheadClock, tmp_path: Path, number: signal.Signals, outcome: Outcome
) -> None:
    first, _ = run("first")
    asked = trial(tmp_path, "second", size=8, end_profile_step=10_000)
    launcher.start(asked)
    updates_until(launcher, lambda seen: events(seen, StepMeasured))
    os.kill(first.pids[-1], number)
    if outcome is Outcome.STALLED:
        while launcher.poll(1.0):  # steps before the stop, which would count as those of the time ahead
            pass
        clock.ahead_s = 100.0
    failed = reports(updates_until_finished(launcher))[asked.launch_id]
    assert (failed.outcome, failed.root) == (outcome, first.launch_id)
    assert failed.afresh == (outcome is Outcome.STALLED), "a killed launch is repeated by the tuner"
    assert_gone(first.pids)
    clock.ahead_s = 0.0
    again, _ = run("again", size=8)
    more, _ = run("more", size=2)
    assert (again.root, more.root) == ("", again.launch_id), "sizes are followed as before"


def test_a_rank_that_is_stopped_between_two_trials_is_found(run: Run, launcher: TorchrunLauncher) -> None:
    first, _ = run("first")
    os.kill(first.pids[-1], signal.SIGSTOP)
    stalled, _ = run("second", size=8, stall_s=3)
    assert (stalled.outcome, stalled.afresh) == (Outcome.STALLED, True)
    assert_gone(first.pids)
    assert launcher.free_slots == 2


def test_a_profile_and_a_pruned_trial_leave_their_ranks_to_the_next_and_what_is_ordered_can_be_stopped(
    launcher: TorchrunLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = ("--wait-for", str(tmp_path / "stopped"))  # the second is stopped before its last step
    monkeypatch.setattr(launcher, "_longest_start_s", 60.0)  # the steps left may take that long on a busy machine
    profile = replace(trial(tmp_path, "profile", *waiting, size=1), purpose="profile")
    launcher.start(profile)
    assert reports(updates_until_finished(launcher))[profile.launch_id].outcome is Outcome.MEASURED
    pruned = trial(tmp_path, "pruned", *waiting, size=4, end_profile_step=8)
    launcher.start(pruned)
    seen = updates_until(launcher, lambda seen: events(seen, StepMeasured))
    launcher.stop(pruned.launch_id)
    (tmp_path / "stopped").touch()
    report = reports([*seen, *updates_until_finished(launcher)])[pruned.launch_id]
    assert (report.outcome, report.root) == (Outcome.PRUNED, profile.launch_id)
    second = trial(tmp_path, "second", *waiting, size=2)
    launcher.start(second)
    assert reports(updates_until_finished(launcher))[second.launch_id].root == profile.launch_id
    stopped = trial(tmp_path, "stopped", *waiting, size=8)
    launcher.start(stopped)
    launcher.stop(stopped.launch_id)
    assert reports(updates_until_finished(launcher))[stopped.launch_id].outcome is Outcome.PRUNED
    launcher.start(trial(tmp_path, "last", *waiting, size=2))
    updates = updates_until_finished(launcher)
    assert sizes(events(updates, StepMeasured)) == {2}
    assert {event.train_micro_batch_size_per_gpu for event in events(updates, EngineReady)} == {2}


def test_a_profile_that_changed_the_users_files_goes_on_with_nothing(
    launcher: TorchrunLauncher, tmp_path: Path
) -> None:
    """Without overlays a subprocess writes past the redirection, which the profile launch shows."""
    options = ("--touch", str(tmp_path / "made.txt"))
    launcher.start(replace(trial(tmp_path, "profile", *options, isolation="python"), purpose="profile"))
    updates_until_finished(launcher)
    baseline = trial(tmp_path, "baseline", *options, size=8, isolation="python")
    launcher.start(baseline)
    with pytest.raises(ScriptFailedError, match=r"changed .*made\.txt"):
        updates_until_finished(launcher)
    launcher.stop(baseline.launch_id)
    assert [*reports(updates_until_finished(launcher))] == [baseline.launch_id]
