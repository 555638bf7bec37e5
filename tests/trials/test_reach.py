from __future__ import annotations

from collections.abc import Sequence

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.outcome import Outcome
from optuna_dsat.trials.attributes import OUTCOME
from optuna_dsat.trials.lineage import MICRO_BATCH, MicroBatchSet, group
from optuna_dsat.trials.lineage_index import Lineages
from optuna_dsat.trials.reach import within_reach

UP, DOWN = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
SIZES = IntDistribution(1, 1024)


def trial(number: int, stage: int, size: int, value: float | None) -> FrozenTrial:
    made = create_trial(
        state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
        value=value,
        params={"zero_stage": stage, MICRO_BATCH: size},
        distributions={"zero_stage": CategoricalDistribution([1, 2, 3]), MICRO_BATCH: SIZES},
        user_attrs={OUTCOME: (Outcome.OUT_OF_MEMORY if value is None else Outcome.MEASURED).value},
    )
    made.number = number
    return made


def lineages(*points: tuple[int, int, float | None]) -> Lineages:
    return Lineages(group([trial(number, *point) for number, point in enumerate(points)]).values())


def reach(known: Lineages, *, proven: Sequence[int] = (1,), direction: StudyDirection = UP) -> int:
    (asking,) = group([trial(99, 1, 1, 1.0)]).values()
    return within_reach(asking, known, SIZES, proven=proven, direction=direction)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], 16),
        ([(1, 4, 1.0)], 16),
        ([(1, 20, 1.0), (3, 6, 1.0)], 40),
        ([(3, 20, 1.0)], 16),
        ([(3, 10, 1.0), (3, 20, 2.0)], 40),
        ([(3, 10, 1.0), (3, 20, 2.0), (3, 40, 2.0)], 40),
        ([(1, 8, None)], 2),
        ([(1, 8, None), (3, 6, 1.0), (3, 12, 2.0)], 24),
    ],
    ids=[
        "own",
        "less than own",
        "structure",
        "another that was not compared",
        "another that gained",
        "another that gained once",
        "own is too large",
        "own is too large here",
    ],
)
def test_twice_what_fitted_is_in_reach(points: Sequence[tuple[int, int, float | None]], expected: int) -> None:
    assert reach(lineages(*points), proven=(1, 8)) == expected


def test_the_next_size_of_a_users_own_list_is_in_reach() -> None:
    known = lineages((1, 4, 1.0))
    (asking,) = known.values()
    assert within_reach(asking, known, MicroBatchSet([4, 60, 200]), proven=(1,), direction=UP) == 60


@pytest.mark.parametrize(
    ("points", "direction", "expected"),
    [
        ([(1, 4, 100.0), (1, 8, 150.0), (1, 16, 170.0)], UP, 32),
        ([(1, 4, 100.0), (1, 8, 150.0), (1, 16, 152.0), (1, 32, 152.0)], UP, 16),
        ([(1, 4, 100.0), (1, 6, 101.0)], UP, 12),
        ([(2, 4, 100.0), (2, 8, 100.0)], UP, 2),
        ([(1, 4, 1.0), (1, 8, 2.0)], DOWN, 16),
    ],
    ids=["gains", "flat", "no doubling", "another structure", "durations"],
)
def test_a_structure_goes_no_higher_than_a_doubling_without_gain(
    points: Sequence[tuple[int, int, float]], direction: StudyDirection, expected: int
) -> None:
    assert reach(lineages(*points), direction=direction) == expected
