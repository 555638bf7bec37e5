from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.outcome import Outcome
from optuna_dsat.trials.attributes import OUTCOME
from optuna_dsat.trials.bisection import edge_interval, ended, optimistic_bound, refine
from optuna_dsat.trials.lineage import MICRO_BATCH, PLAN_ATTR, Lineage, group

UP, DOWN = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
SIZES = IntDistribution(1, 64)
TOO_LARGE = None


def trial(size: int, value: float | None, *, high: int = 64) -> FrozenTrial:
    plan = {"lineage": {"zero_stage": 1}, "micro_batch": size, "low": 1, "high": high}
    return create_trial(
        state=TrialState.PRUNED if value is TOO_LARGE else TrialState.COMPLETE,
        value=value,
        params={"zero_stage": 1, MICRO_BATCH: size},
        distributions={"zero_stage": CategoricalDistribution([1]), MICRO_BATCH: SIZES},
        user_attrs={OUTCOME: (Outcome.OUT_OF_MEMORY if value is TOO_LARGE else Outcome.MEASURED).value},
        system_attrs={PLAN_ATTR: plan},
    )


def lineage(points: Sequence[tuple[int, float | None]], *, high: int = 64) -> Lineage:
    (result,) = group([trial(size, value, high=high) for size, value in points]).values()
    return result


@pytest.mark.parametrize(
    ("points", "direction", "best", "expected"),
    [
        ([(8, 80.0)], UP, None, (9, 64)),
        ([(8, 80.0), (32, TOO_LARGE)], UP, None, (9, 31)),
        ([(8, 80.0), (9, TOO_LARGE)], UP, None, None),  # nothing is left
        ([(40, 80.0), (43, TOO_LARGE)], UP, None, None),  # less than 5% is left
        ([(40, 80.0), (44, TOO_LARGE)], UP, None, (41, 43)),
        ([(40, 80.0), (43, TOO_LARGE)], DOWN, None, (41, 42)),
        ([(8, 80.0), (16, 70.0)], UP, None, None),  # past the peak
        ([(32, 50.0)], UP, 99.0, (33, 64)),
        ([(32, 50.0)], UP, 101.0, None),  # at 64 it is twice as fast at most
        ([(32, 50.0)], DOWN, 10.0, (33, 64)),
        ([(32, TOO_LARGE)], UP, 1000.0, (1, 31)),  # nothing is known of it
    ],
)
def test_climbing_goes_on_while_it_can_pay(
    points: Sequence[tuple[int, float | None]],
    direction: StudyDirection,
    best: float | None,
    expected: tuple[int, int] | None,
) -> None:
    result = lineage(points)
    assert edge_interval(result, 64, SIZES, direction=direction, best=best) == expected
    assert ended(result, direction, best) == (expected is None and not refine(result, SIZES, direction=direction))


def test_the_gap_beside_a_peak_is_left_where_it_cannot_hold_the_best() -> None:
    passed = lineage([(10, 50.0), (20, 60.0), (40, 40.0)])
    assert list(refine(passed, SIZES, direction=UP)) == list(range(21, 40))
    assert refine(passed, SIZES, direction=UP, best=66.0)
    assert not refine(passed, SIZES, direction=UP, best=67.0)  # at 39, going on like from 10 to 20, 66.5
    assert ended(passed, UP, 67.0)
    assert not ended(passed, UP, 66.0)


def test_a_lineage_ends_at_the_ceiling_of_its_plan() -> None:
    assert ended(lineage([(8, 80.0)], high=8), UP)
    assert not ended(lineage([(8, 80.0)], high=10), UP)
    assert ended(lineage([(1, TOO_LARGE)]), UP)


def rate(size: int) -> float:
    return size / (2.0 + 0.1 * size)


@pytest.mark.parametrize(
    ("points", "low", "high", "direction", "expected"),
    [
        ([], 1, 64, UP, math.inf),
        ([], 1, 64, DOWN, -math.inf),
        ([(8, 10.0)], 9, 8, UP, -math.inf),
        ([(8, 10.0)], 9, 8, DOWN, math.inf),
        ([(8, 10.0)], 9, 32, UP, 40.0),
        ([(32, 10.0)], 1, 31, UP, 10.0),
        ([(8, rate(8)), (16, rate(16))], 17, 64, UP, rate(64)),
        ([(8, rate(8)), (16, rate(16)), (32, rate(32))], 33, 64, UP, rate(64)),
        ([(8, 10.0), (16, 8.0)], 17, 64, UP, 8.0),
        ([(8, 10.0), (16, 9.9)], 17, 64, UP, 10.0),
        ([(8, 10.0), (16, 30.0)], 17, 32, UP, 60.0),
        ([(8, -1.0)], 9, 64, UP, math.inf),
        ([(8, 2.0)], 9, 64, DOWN, 2.0),
        ([(8, 2.0), (16, 3.0)], 9, 15, DOWN, 2.0),
        ([(8, 2.0)], 2, 7, DOWN, 0.5),
        ([(8, 0.0)], 9, 64, DOWN, -math.inf),
    ],
)
def test_potential(
    points: list[tuple[int, float]], low: int, high: int, direction: StudyDirection, expected: float
) -> None:
    assert optimistic_bound(points, low, high, direction=direction, margin=0.03) == pytest.approx(expected)
