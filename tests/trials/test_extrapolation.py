from __future__ import annotations

import math

import pytest
from optuna.study import StudyDirection

from optuna_dsat.trials.bisection import optimistic_bound

UP, DOWN = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE


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
