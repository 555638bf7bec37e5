from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.launch.protocol import Finished, Launcher, LaunchUpdate, Observed
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import (
    EngineReady,
    RankFailed,
    RankFinished,
    RankStarted,
    StepMeasured,
)
from tests.harness.launches import DS_CONFIG, events, reports, request, updates_until_finished
from tests.harness.simulated import SimulatedLauncher, SimulatedProfile, SimulatedResult


class Hill:
    """Forty samples fit; the rest is linear."""

    def profile(self, slots: int) -> SimulatedProfile:
        return SimulatedProfile(
            params=1000 * slots,
            trainable_params=1000,
            largest_layer_params=100,
            param_bytes=2,
            activation_bytes_per_sample=10,
            flops_per_sample=100,
            device_memory_bytes=10**6,
            host_memory_bytes=10**7,
            peak_bytes=10**5,
        )

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        micro_batch = ds_config["train_micro_batch_size_per_gpu"]
        if micro_batch > 40:
            return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=10.0, missing_bytes=7)
        outcome = Outcome(ds_config.get("outcome", "measured"))
        return SimulatedResult(
            outcome=outcome,
            startup_s=10.0,
            forward_s=0.1 * micro_batch,
            backward_s=0.2 * micro_batch,
            step_s=0.5,
            other_s=0.5 / slots,
            peak_bytes=micro_batch,
        )


def launcher(**options: Any) -> SimulatedLauncher:
    return SimulatedLauncher(Hill(), **options)


def config(micro_batch: int = 10, **more: Any) -> dict[str, Any]:
    return {**DS_CONFIG, "train_micro_batch_size_per_gpu": micro_batch, **more}


def run(simulated: SimulatedLauncher, **fields: Any) -> list[LaunchUpdate]:
    simulated.start(request(Path("/nowhere"), **fields))
    return updates_until_finished(simulated)


def test_a_measured_launch_sends_what_a_real_one_sends() -> None:
    simulated: Launcher = launcher()
    simulated.start(request(Path("/nowhere"), ds_config=config(), slots=2))
    assert simulated.free_slots == 6
    updates = updates_until_finished(simulated)
    kinds = [type(u.event) for u in updates if isinstance(u, Observed) and u.event.rank == 1]
    assert kinds == [RankStarted, EngineReady, StepMeasured, StepMeasured, StepMeasured, RankFinished]
    step = events(updates, StepMeasured)[0]
    assert step.latency_s == pytest.approx(3.75)
    assert (step.samples, step.observed_micro_batch, step.peak_allocated_bytes) == (10, 10, 10)
    assert [e.step for e in events(updates, StepMeasured) if e.rank == 0] == [1, 2, 3]
    times = [u.event.time for u in updates if isinstance(u, Observed)]
    assert times == sorted(times)
    report = reports(updates)["trial-0000"]
    assert isinstance(updates[-1], Finished)
    assert report.outcome is Outcome.MEASURED
    assert report.devices == (0, 1)
    assert report.startup_s == pytest.approx(13.75)
    assert report.measured_s == pytest.approx(7.5)
    assert simulated.free_slots == simulated.total_slots == 8


def test_out_of_memory_is_recorded_by_a_rank() -> None:
    updates = run(launcher(), ds_config=config(41))
    assert events(updates, RankFailed)[0].outcome == "out_of_memory"
    assert not events(updates, StepMeasured)
    report = reports(updates)["trial-0000"]
    assert report.outcome is Outcome.OUT_OF_MEMORY
    assert report.missing_bytes == 7


@pytest.mark.parametrize(
    ("outcome", "limits", "expected", "seconds"),
    [
        ("stalled", {"stall_s": 100.0}, Outcome.STALLED, 109.0),
        ("stalled", {"stall_s": 100.0, "timeout_s": 50.0}, Outcome.TIMEOUT, 50.0),
        ("timeout", {"stall_s": 600.0, "timeout_s": 50.0}, Outcome.TIMEOUT, 50.0),
        ("measured", {"timeout_s": 12.0}, Outcome.TIMEOUT, 12.0),
        ("script_error", {}, Outcome.SCRIPT_ERROR, 10.0),
    ],
)
def test_limits_end_a_launch(outcome: str, limits: dict[str, float], expected: Outcome, seconds: float) -> None:
    simulated = launcher()
    report = reports(run(simulated, ds_config=config(outcome=outcome), **limits))["trial-0000"]
    assert report.outcome is expected
    assert simulated.now_s == pytest.approx(seconds + 0.5)


def latencies(simulated: SimulatedLauncher, micro_batch: int = 10) -> list[float]:
    return [e.latency_s for e in events(run(simulated, ds_config=config(micro_batch)), StepMeasured)]


def test_noise_depends_on_seed_configuration_and_attempt_alone() -> None:
    item, same, other = launcher(noise=0.05), launcher(noise=0.05), launcher(noise=0.05, seed=1)
    first = latencies(item)
    latencies(same, 20)  # another configuration in between changes nothing
    assert latencies(same) == first
    assert latencies(item) != first
    assert latencies(other) != first
    assert len({*first}) == 3
    assert latencies(launcher()) == [3.75] * 6
