from __future__ import annotations

import math
import random
import statistics

import pytest
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.pruners._inflight import Reports, below_rung, cannot_win

UP, DOWN = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE


def reported(state: TrialState, values: dict[int, float]) -> FrozenTrial:
    return create_trial(state=state, value=1.0 if state == TrialState.COMPLETE else None, intermediate_values=values)


def some(chance: random.Random) -> FrozenTrial:
    values = {step: chance.choice([chance.uniform(50, 100), math.nan]) for step in range(3, 3 + chance.randint(0, 3))}
    return reported(chance.choice([TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]), values)


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_answers_kept_are_those_worked_out_from_nothing(direction: StudyDirection) -> None:
    chance = random.Random(0)
    finished: list[FrozenTrial] = []
    kept = Reports(finished)
    verdicts = set()
    for _ in range(60):
        finished += [some(chance) for _ in range(chance.randint(0, 3))]
        fresh = Reports(finished)
        assert kept.noise() == fresh.noise()
        for steps in ((3,), (3, 4), (4,), (3, 4, 5)):
            assert kept.best(steps, direction) == fresh.best(steps, direction)
        assert kept.at_step(4) == fresh.at_step(4)
        running = reported(TrialState.RUNNING, {3: chance.uniform(40, 110)})
        others = [reported(TrialState.RUNNING, {3: chance.uniform(40, 110)}) for _ in range(2)]
        verdict = (
            cannot_win(running, kept, direction=direction, margin=0.1),
            below_rung(running, kept, others, direction=direction, divisor=2, early_stopping=0),
        )
        assert verdict == (
            cannot_win(running, fresh, direction=direction, margin=0.1),
            below_rung(running, fresh, others, direction=direction, divisor=2, early_stopping=0),
        )
        verdicts.add(verdict)
    assert len(verdicts) > 1


def test_noise_is_the_median_over_completed_trials() -> None:
    rows = [[10.0, 11.0], [10.0, 12.0], [10.0, 10.5], [10.0, math.nan]]
    finished = [reported(TrialState.COMPLETE, dict(enumerate(row))) for row in rows]
    finished.append(reported(TrialState.PRUNED, {0: 1.0, 1: 99.0}))
    expected = statistics.stdev([10.0, 11.0]) / 10.5
    assert Reports(finished).noise() == pytest.approx(expected)
    assert Reports([]).noise() == 0.0


def test_a_job_is_judged_among_those_that_fit_or_run() -> None:
    fits = [reported(TrialState.COMPLETE, {3: value}) for value in (10.0, 20.0, 30.0)]
    broken = [reported(TrialState.FAIL, {3: 99.0})]
    job = reported(TrialState.RUNNING, {3: 25.0})

    def falls(trials: list[FrozenTrial], pending: list[FrozenTrial]) -> bool:
        return below_rung(job, Reports(trials), pending, direction=UP, divisor=2, early_stopping=0)

    assert not falls(fits, [])  # second of four, two stay
    assert not falls([*fits, *broken], [])
    assert falls(fits, [reported(TrialState.RUNNING, {3: 40.0})])  # third of five, two stay
    assert not falls([], [])
