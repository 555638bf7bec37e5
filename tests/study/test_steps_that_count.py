"""A study of a script whose first updates are skipped and whose inputs vary in size, over a simulated landscape."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from optuna.trial import TrialState

from optuna_dsat.cli.show import show_result
from optuna_dsat.escape.markdown import literal
from optuna_dsat.launch.protocol import LaunchUpdate, Observed
from optuna_dsat.report.dashboard.notes import trial_note
from optuna_dsat.report.page import render
from optuna_dsat.report.view import read_view
from optuna_dsat.runtime.events import StepMeasured
from optuna_dsat.study.progress import TrialStepped
from optuna_dsat.study.stored import record_of, trial_row
from optuna_dsat.trials import attributes
from optuna_dsat.words import metric_in_words, steps_in_words
from tests.harness.entry_points import leave
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher
from tests.harness.studies import StudyBench

pytestmark = pytest.mark.usefixtures("in_sqlite")

SKIPS = 2
RESUMED = 700
"""Batches that the training had completed before each launch."""
LENGTHS = (80, 100, 120)
"""Tokens per sample, in turn."""


class HalfPrecisionLauncher(SimulatedLauncher):
    """Skips the first updates of a launch, evaluates before one and pads each step's inputs to another length."""

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        return [changed for update in super().poll(timeout_s) for changed in _changed(update)]


def _changed(update: LaunchUpdate) -> Iterator[LaunchUpdate]:
    event = update.event if isinstance(update, Observed) else None
    if not isinstance(event, StepMeasured):
        yield update
        return
    if event.step == 1:
        for index in range(SKIPS):
            skipped = replace(event, step=index + 1, skipped=True, skipped_before=index, latency_s=99.0)
            yield Observed(launch_id=update.launch_id, event=skipped)
    evaluation_s = event.latency_s if event.step == 5 else 0.0
    elements = event.samples * LENGTHS[event.step % len(LENGTHS)]
    padded = replace(
        event,
        step=event.step + SKIPS,
        skipped_before=SKIPS,
        latency_s=event.latency_s + evaluation_s,
        evaluation_s=evaluation_s,
        elements=elements,
        elements_are_tokens=True,
        steps_completed=RESUMED + SKIPS + event.step,
    )
    yield Observed(launch_id=update.launch_id, event=padded)


def test_every_record_of_a_study_counts_the_same_steps_and_every_view_says_so(
    bench: StudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = HalfPrecisionLauncher(Hill(), total_slots=2, noise=0.0)
    result = bench.run_by(launcher, bench.spec(end_profile_step=8, max_trials=4))
    assert result.reason
    stored = record_of(bench.store, "s")
    uuid = stored.uuid
    measured = [trial for trial in bench.study().trials if trial.state is TrialState.COMPLETE]
    assert len(measured) > 2
    steps = [event.step for event in bench.news if isinstance(event, TrialStepped)]
    assert set(steps) == set(range(1, 33))  # the finalists': all 30 that count, though they are long
    times = bench.store.step_times(uuid, from_step=3)
    for trial in measured:
        assert list(trial.intermediate_values) == [3, 4, 5, 6, 7, 8]  # and none ended early
        assert trial.user_attrs[attributes.SKIPPED_STEPS] == trial_row(trial, result.verdict)["skipped_steps"] == SKIPS
        completed = trial_row(trial, result.verdict)["steps_completed"]
        assert trial.user_attrs[attributes.STEPS_COMPLETED] == completed == RESUMED + SKIPS + 8
        assert trial.user_attrs[attributes.INPUT_VARIATION] == pytest.approx(0.4)
        metrics = trial.user_attrs[attributes.METRICS]
        assert metrics["tokens_per_s"] == pytest.approx(100 * metrics["throughput"])
        counted = times[trial.user_attrs[attributes.LAUNCH_ID]]
        assert len(counted) == 6
        assert sum(counted) / 6 == pytest.approx(metrics["latency"])
        assert len(bench.store.steps(uuid, trial.user_attrs[attributes.LAUNCH_ID])) == 2 * (8 + SKIPS)
    assert result.metrics["tokens_per_s"] == pytest.approx(100 * result.metrics["throughput"])
    show_result(result, as_json=False)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Steps: ")]
    assert line.startswith(
        "Steps: 2 steps skipped by the loss scaler, not counted; 14% of the steps' time is left out: evaluation or "
        "generation between some of them; including it, training is about "
    )
    assert "x as fast as with your config; inputs of a sample vary by 40% from step" in line
    assert metric_in_words("tokens_per_s", result.metrics["tokens_per_s"]) in line
    winner = bench.study().trials[result.trial]
    words = steps_in_words(**attributes.step_facts(winner))
    assert words.startswith("2 steps skipped by the loss scaler, not counted; 14% of the steps' time is left out")
    assert leave("show", "s", "--storage", bench.store.url) == 0
    assert f"{words})" in capsys.readouterr().out
    view = read_view(bench.store, "s")
    assert words in html.unescape(render(view))
    note = trial_note(view, next(trial for trial in view.trials if trial.number == winner.number))
    assert literal(words) in note


def test_a_ratio_is_told_without_the_difference_in_length() -> None:
    """Batches sorted by length: small batches contain the longest texts, larger batches shorter texts too."""
    own = {"throughput": 28.0, "tokens_per_s": 2900.0}
    best = {"throughput": 184.0, "tokens_per_s": 10_760.0}
    assert steps_in_words(skipped=0, variation=0.0, metrics=best, user_metrics=own) == (
        "a sample has 58.5 tokens with its padding, and 104 with your config: by tokens/s it is 3.71x as fast"
    )
    for alike in ({"throughput": 56.0, "tokens_per_s": 5900.0}, {}):
        assert steps_in_words(skipped=0, variation=0.0, metrics=alike, user_metrics=own) == ""


@pytest.mark.parametrize(("user_left_out", "whole"), [(0.0, "8.50"), (0.2, "10.6")])
def test_a_ratio_is_told_with_the_time_that_is_left_out(user_left_out: float, whole: str) -> None:
    """Rollouts of a fixed size: the steps were 21.2 times as fast, the training 8 to 12 times."""
    left: dict[str, Any] = {"skipped": 0, "variation": 0.0, "left_out": 0.6}
    words = steps_in_words(
        **left, metrics={"throughput": 212.5}, user_left_out=user_left_out, user_metrics={"throughput": 10.0}
    )
    assert words.endswith(f"; including it, training is about {whole}x as fast as with your config")
    assert "including" not in steps_in_words(**left, metrics={"throughput": 212.5})


def test_a_script_of_equal_steps_has_no_such_line(bench: StudyBench) -> None:
    result = bench.run(bench.spec(max_trials=2), Hill())
    assert result.measurement == ""
    assert "tokens_per_s" not in result.metrics


def test_of_many_steps_some_are_reported_and_the_last(bench: StudyBench) -> None:
    spec = bench.spec(end_profile_step=400, max_trials=1, confirm=0)
    bench.run(spec, Hill())
    [trial] = bench.study().trials
    first = spec.start_profile_step
    assert list(trial.intermediate_values)[:50] == list(range(first, first + 50))
    assert len(trial.intermediate_values) < 200
    assert max(trial.intermediate_values) == 400
