"""Why a run is slower than predicted: a study of one configuration beside the data sheet of its device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.launch.protocol import Conditions
from optuna_dsat.report.explain.prediction_gap import PredictionGap, prediction_gap
from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.study.confirm.words import remarks_in_words
from optuna_dsat.words import times_in_words
from tests.harness.entry_points import leave
from tests.harness.landscapes import GIB, Hill
from tests.harness.reports import ReportedStudyBench
from tests.harness.simulated import SimulatedResult


def single(bench: ReportedStudyBench, *, forward_s: float, other_s: float = 0.0) -> StudyView:
    """Return a study of the user's config alone, as if its launch had run on an A100."""

    def step(_config: Mapping[str, Any]) -> SimulatedResult:
        times: dict[str, Any] = {
            "forward_s": forward_s,
            "backward_s": 2 * forward_s,
            "step_s": 0.02,
            "other_s": other_s,
        }
        return SimulatedResult(startup_s=10, peak_bytes=20 * GIB, **times)

    bench.run(bench.spec(max_trials=1, confirm=0), Hill(step))
    view = read_view(bench.store, "s")
    assert view.profiled is not None
    profile = replace(view.profiled.profile, device_name="NVIDIA A100-SXM4-80GB")
    return replace(view, profiled=replace(view.profiled, profile=profile))


def gap_of(view: StudyView) -> PredictionGap:
    result = prediction_gap(view)
    assert result is not None
    return result


def test_a_step_as_the_data_sheet_promises_has_no_causes(bench: ReportedStudyBench) -> None:
    view = single(bench, forward_s=0.03)
    assert view.verdict is not None
    assert not remarks_in_words(view.verdict)
    result = gap_of(view)
    assert result.low_s < result.predicted_s < result.high_s
    assert result.causes == ()
    assert "by the data sheet of a100-80g" in result.verdict


def test_a_slow_step_names_the_phases_that_it_goes_into(bench: ReportedStudyBench) -> None:
    result = gap_of(single(bench, forward_s=1.0))
    assert result.measured_s == pytest.approx(3.02)
    assert result.ratio > 3
    assert (
        f"it is {times_in_words(result.ratio)} times as long, which the prediction does not explain" in result.verdict
    )
    first, second, *others = result.causes
    assert first.startswith("backward takes 2 s where ")
    assert second.startswith("forward takes 1 s where ")
    assert "look at attention that is not fused" in first
    assert others == []


def test_time_outside_the_engine_is_the_data_loaders_or_pythons(bench: ReportedStudyBench) -> None:
    view = single(bench, forward_s=1.0, other_s=2.0)
    assert view.verdict is not None
    (remark,) = remarks_in_words(view.verdict)
    assert remark.startswith("40% of a step is outside forward, backward and optimizer step: data loading")
    result = gap_of(view)
    assert result.measured_phases["other"] == pytest.approx(2.0)
    assert "2 s of each step (40%) pass outside forward, backward and step: the data loader" in "\n".join(result.causes)


def test_what_went_on_beside_the_launch_and_uneven_steps_are_told(bench: ReportedStudyBench) -> None:
    view = single(bench, forward_s=1.0)
    busy = Conditions(
        window_s=10.0,
        others_cpu_s=20.0,
        cores=4,
        gpu_processes=("process 7 (python3)",),
        throttle_reasons=("power limit",),
    )
    launches = tuple(replace(launch, report=replace(launch.report, conditions=busy)) for launch in view.launches)
    times = dict.fromkeys(view.step_times, (3.0, 3.0, 9.0))
    causes = gap_of(replace(view, launches=launches, step_times=times)).causes
    assert any("Steps are uneven: the slowest took 9 s" in cause for cause in causes)
    assert any("Other processes took 50% of the cores" in cause for cause in causes)
    assert any("Others used its GPUs: process 7 (python3)." in cause for cause in causes)
    assert any("clocks were held down: power limit." in cause for cause in causes)


def test_without_a_data_sheet_the_command_compares_nothing(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    single(bench, forward_s=0.03)
    storage = f"sqlite:///{bench.folder / 'study.db'}"
    shown = {}
    for options in ((), ("--json",)):
        assert leave("explain", "s", "--storage", storage, *options) == 0
        shown[options] = capsys.readouterr().out
    assert "No other configuration was measured." in shown[()]
    assert "A step takes 110 ms" not in shown[()], "there is no data sheet, as in the report"
    assert json.loads(shown["--json",])["prediction"] is None
