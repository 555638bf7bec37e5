from __future__ import annotations

import math
import statistics

import pytest
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.pruners._inflight import below_rung, step_noise

UP = StudyDirection.MAXIMIZE


def reported(state: TrialState, values: dict[int, float]) -> FrozenTrial:
    return create_trial(state=state, value=1.0 if state == TrialState.COMPLETE else None, intermediate_values=values)


def test_noise_is_the_median_over_completed_trials() -> None:
    rows = [[10.0, 11.0], [10.0, 12.0], [10.0, 10.5], [10.0, math.nan]]
    finished = [reported(TrialState.COMPLETE, dict(enumerate(row))) for row in rows]
    finished.append(reported(TrialState.PRUNED, {0: 1.0, 1: 99.0}))
    expected = statistics.stdev([10.0, 11.0]) / 10.5
    assert step_noise(finished) == pytest.approx(expected)
    assert step_noise([]) == 0.0


def test_a_job_is_judged_among_those_that_fit_or_run() -> None:
    fits = [reported(TrialState.COMPLETE, {3: value}) for value in (10.0, 20.0, 30.0)]
    broken = [reported(TrialState.FAIL, {3: 99.0})]
    job = reported(TrialState.RUNNING, {3: 25.0})

    def falls(trials: list[FrozenTrial], pending: list[FrozenTrial]) -> bool:
        return below_rung(job, trials, pending, direction=UP, divisor=2, early_stopping=0)

    assert not falls(fits, [])  # second of four, two stay
    assert not falls([*fits, *broken], [])
    assert falls(fits, [reported(TrialState.RUNNING, {3: 40.0})])  # third of five, two stay
    assert not falls([], [])
