from __future__ import annotations

from pathlib import Path

import pytest

from optuna_dsat.launch.protocol import Finished, Observed
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import EngineReady, RankFinished, RankStarted, StepMeasured
from tests.harness.landscapes import GIB, Hill
from tests.harness.launches import DS_CONFIG, events, reports, request, run, updates_until_finished
from tests.harness.simulated import SimulatedLauncher

NOWHERE = Path("/nowhere")


def test_a_simulated_launch_sends_what_a_real_one_sends() -> None:
    simulated = SimulatedLauncher(Hill())
    config = {**DS_CONFIG, "train_micro_batch_size_per_gpu": 10}
    simulated.start(request(NOWHERE, ds_config=config, slots=2))
    assert simulated.free_slots == 6
    updates = updates_until_finished(simulated)
    kinds = [type(u.event) for u in updates if isinstance(u, Observed) and u.event.rank == 1]
    assert kinds == [RankStarted, EngineReady, StepMeasured, StepMeasured, StepMeasured, RankFinished]
    step = events(updates, StepMeasured)[0]
    assert step.latency_s == pytest.approx(0.44)
    assert (step.samples, step.observed_micro_batch, step.peak_allocated_bytes) == (10, 10, 28 * GIB)
    assert [e.step for e in events(updates, StepMeasured) if e.rank == 0] == [1, 2, 3]
    times = [u.event.time for u in updates if isinstance(u, Observed)]
    assert times == sorted(times)
    report = reports(updates)["trial-0000"]
    assert isinstance(updates[-1], Finished)
    assert report.outcome is Outcome.MEASURED
    assert report.devices == (0, 1)
    assert report.startup_s == pytest.approx(10.44)
    assert report.measured_s == pytest.approx(0.88)
    assert simulated.free_slots == simulated.total_slots == 8


def test_a_trial_that_differs_in_live_settings_continues_a_launch() -> None:
    simulated = SimulatedLauncher(Hill(), noise=0.05, seed=2, continues=True)
    luck = []
    for number, size in enumerate((10, 20, 10)):
        config = {**DS_CONFIG, "train_micro_batch_size_per_gpu": size}
        launch_id = f"trial-{number:04d}"
        simulated.start(request(NOWHERE, ds_config=config, slots=2, launch_id=launch_id, continues=True))
        assert simulated.free_slots == 6
        updates = updates_until_finished(simulated)
        report = reports(updates)[launch_id]
        steps = [event.latency_s for event in events(updates, StepMeasured)]
        luck.append(sum(steps) / len(steps) / Hill().run(config, 2).latency_s)
        assert simulated.free_slots == 8
        assert report.root == ("" if number == 0 else "trial-0000")
        assert (report.startup_s < 2) == (number > 0)
    assert max(luck) - min(luck) < 0.02 < abs(luck[0] - 1)
    simulated.poll(0.0)
    report, _ = run(simulated, request(NOWHERE, ds_config=DS_CONFIG, slots=2, launch_id="trial-0009", continues=True))
    assert report.root == ""


def test_another_stage_or_a_failure_ends_the_launch() -> None:
    simulated = SimulatedLauncher(Hill(), continues=True)
    configs = [
        {**DS_CONFIG, "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": size}
        for stage, size in ((1, 10), (2, 10), (2, 100_000), (2, 10))
    ]
    roots, outcomes = [], []
    for number, config in enumerate(configs):
        launch_id = f"trial-{number:04d}"
        report, _ = run(simulated, request(NOWHERE, ds_config=config, slots=2, launch_id=launch_id, continues=True))
        roots.append(report.root)
        outcomes.append(report.outcome)
    assert roots == ["", "", "trial-0001", ""]
    assert outcomes[2] is Outcome.OUT_OF_MEMORY
