from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.outcome import Outcome
from optuna_dsat.trials.attributes import METRICS, OUTCOME, OVERHEAD_S
from optuna_dsat.trials.lineage import MICRO_BATCH, MicroBatchSet, group
from optuna_dsat.trials.lineage_index import Lineages
from optuna_dsat.trials.reach import DEAR, within_reach, worth_its_seconds

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


def doubled(*gains: float) -> Lineages:
    """Lineages of one structure, each with a micro-batch of 4 and what a doubling gained."""
    trials: list[FrozenTrial] = []
    for place, gain in enumerate(gains):
        for size, value in ((4, 100.0), (8, 100.0 * (1 + gain))):
            made = trial(len(trials), 1, size, value)
            made.params["reduce_bucket_size"] = 1000 * (place + 1)
            made.distributions["reduce_bucket_size"] = IntDistribution(1000, 10**9)
            trials.append(made)
    return Lineages(group(trials).values())


@pytest.mark.parametrize(
    ("gains", "expected"),
    [((0.01,), 8), ((0.01, 0.1, 0.1), 16), ((0.01, 0.02, 0.02), 8)],
    ids=["alone", "others gain", "nobody gains"],
)
def test_of_many_doublings_to_a_size_the_mean_decides(gains: Sequence[float], expected: int) -> None:
    assert reach(doubled(*gains)) == expected


def test_what_others_gained_at_smaller_sizes_says_nothing_of_a_doubling() -> None:
    known = lineages((1, 1, 10.0), (1, 2, 20.0), (1, 4, 100.0), (1, 8, 101.0))
    assert reach(known) == 8


STEPS, START_UP_S = 5, 2.0


def timed(*points: tuple[int, int, float]) -> Lineages:
    """Lineages of launches: ZeRO stage, micro-batch, seconds of a step."""
    trials = [trial(number, stage, size, size / step_s) for number, (stage, size, step_s) in enumerate(points)]
    for made, (_, _, step_s) in zip(trials, points, strict=True):
        made.set_user_attr(METRICS, {"latency": step_s})
        made.set_user_attr(OVERHEAD_S, START_UP_S)
    return Lineages(group(trials).values())


def worth(known: Lineages, *, own: int = 4, direction: StudyDirection = UP) -> float:
    (asking,) = group([trial(99, 1, 1, 1.0)]).values()
    return worth_its_seconds(asking, known, own=own, profile_steps=STEPS, direction=direction)


def seconds(size: float, *, of: tuple[int, float]) -> float:
    measured, step_s = of
    return START_UP_S + STEPS * step_s * size / measured


@pytest.mark.parametrize(
    "points", [[], [(2, 4, 0.2)], [(1, 2, 0.1)]], ids=["nothing", "another structure", "less than the user's own"]
)
def test_any_size_is_worth_its_seconds_until_they_are_known(points: Sequence[tuple[int, int, float]]) -> None:
    assert worth(timed(*points)) == math.inf


def test_a_launch_takes_ten_times_the_seconds_of_the_users_own() -> None:
    known = timed((1, 4, 0.4), (1, 16, 1.6))
    assert seconds(worth(known), of=(16, 1.6)) == pytest.approx(DEAR * seconds(4, of=(4, 0.4)))


def test_a_doubling_that_gained_much_may_take_more_seconds() -> None:
    known = timed((1, 4, 0.4), (1, 8, 0.8 / 1.08))
    allowed = DEAR * seconds(4, of=(4, 0.4)) * 0.08 / 0.02
    assert seconds(worth(known), of=(8, 0.8 / 1.08)) == pytest.approx(allowed)


def test_the_users_own_size_is_worth_it_however_long_it_takes() -> None:
    assert worth(timed((1, 1, 400.0), (2, 4, 0.2)), own=4) == 4


def test_no_duration_is_too_long_where_durations_are_minimised() -> None:
    assert worth(timed((1, 4, 0.4), (1, 16, 1.6)), direction=DOWN) == math.inf
