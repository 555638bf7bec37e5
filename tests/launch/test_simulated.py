from __future__ import annotations

from pathlib import Path

import pytest

from optuna_dsat.launch.protocol import Finished, Observed
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import EngineReady, RankFinished, RankStarted, StepMeasured
from tests.harness.landscapes import GIB, Hill
from tests.harness.launches import DS_CONFIG, events, reports, request, updates_until_finished
from tests.harness.simulated import SimulatedLauncher


def test_a_simulated_launch_sends_what_a_real_one_sends() -> None:
    simulated = SimulatedLauncher(Hill())
    config = {**DS_CONFIG, "train_micro_batch_size_per_gpu": 10}
    simulated.start(request(Path("/nowhere"), ds_config=config, slots=2))
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
