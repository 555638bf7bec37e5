from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.trials.effects import Effects, Measurement, effects_of
from optuna_dsat.trials.lineage import MICRO_BATCH, group
from optuna_dsat.trials.lineage_index import Lineages

UP, DOWN = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
BUCKETS = [10**6, 10**7, 10**8]
TRUE: dict[str, dict[Any, float]] = {
    "overlap_comm": {True: 0.0, False: -0.25},
    "reduce_bucket_size": dict.fromkeys(BUCKETS, 0.0),
}
"""Effects on the logarithm of the metric."""


def rate(params: Mapping[str, Any], size: int) -> float:
    level = sum(TRUE[name][params[name]] for name in TRUE)
    stage = 1.5 if params["zero_stage"] == 2 else 1.0
    return 100.0 * math.exp(level) * stage * size / (size + 8)


def measured(*rows: tuple[int, bool, int, int]) -> list[Measurement]:
    """Return measurements of (ZeRO stage, overlap, bucket, micro-batch) with 1% of noise."""
    noise = random.Random(1)
    result = []
    for number, (stage, overlap, bucket, size) in enumerate(rows):
        params = {"zero_stage": stage, "overlap_comm": overlap, "reduce_bucket_size": bucket}
        result.append(Measurement(number, params, size, math.log(rate(params, size)) + noise.gauss(0.0, 0.01)))
    return result


ROWS = [
    (1, False, 10**8, 1),
    (1, False, 10**8, 2),
    (1, False, 10**8, 4),
    (1, False, 10**8, 32),
    (1, True, 10**8, 32),
    (1, True, 10**6, 32),
    (1, False, 10**6, 32),
    (1, True, 10**7, 32),
    (2, False, 10**7, 32),
    (2, False, 10**8, 16),
]


@pytest.fixture(scope="module")
def effects() -> Effects:
    return Effects(measured(*ROWS))


def share(effects: Effects, name: str, choices: list[Any], wanted: Any, stage: int) -> float:
    """Return in how many draws a choice is the best one."""
    rng, params = random.Random(0), {"zero_stage": stage}
    drawn = [effects.draw(rng, name, choices, params) for _ in range(200)]
    best = [choices[max(range(len(choices)), key=values.__getitem__)] for values in drawn]
    return best.count(wanted) / 200


def test_a_choice_is_drawn_with_the_chance_that_it_is_the_best(effects: Effects) -> None:
    assert share(effects, "overlap_comm", [True, False], True, 1) > 0.95
    assert share(effects, "overlap_comm", [True, False], True, 2) > 0.65, "half of an effect holds at any stage"
    assert 0.15 < share(effects, "reduce_bucket_size", BUCKETS, 10**8, 1) < 0.7, "there is none"
    assert share(effects, "never_seen", ["a", "b"], "a", 1) == pytest.approx(0.5, abs=0.15)


def test_a_bad_lineage_is_no_blame_for_its_other_choices(effects: Effects) -> None:
    assert effects.better("reduce_bucket_size", 10**8, BUCKETS, {"zero_stage": 2}) == 10**8
    assert effects.better("overlap_comm", False, [True, False], {"zero_stage": 1}) is True
    assert effects.better("overlap_comm", True, [True, False], {"zero_stage": 1}) is True


def test_a_structure_gains_what_its_own_measurements_lack(effects: Effects) -> None:
    """ZeRO 2 was measured without overlap alone, where it is as fast as ZeRO 1 with it."""
    knobs: dict[str, list[Any]] = {"overlap_comm": [True, False], "reduce_bucket_size": list(BUCKETS)}
    first, second, unseen = (
        effects.expected_gain(random.Random(0), {"zero_stage": stage}, 32, knobs) for stage in (1, 2, 3)
    )
    assert second > 0.1 > first
    assert unseen > first
    assert effects.expected_gain(random.Random(0), {"zero_stage": 1}, 1, knobs) < 1e-6, "far below the best size"


def test_scales_are_told_from_the_measurements(effects: Effects) -> None:
    assert effects.scales.knob == 0.12
    assert effects.scales.noise <= 0.02
    assert effects.best_size == 32
    flat = [(1, overlap, bucket, 32) for overlap in (True,) for bucket in BUCKETS] * 3
    assert Effects(measured(*flat)).scales.knob == 0.01


def trial(number: int, value: float, size: int = 8) -> FrozenTrial:
    made = create_trial(
        state=TrialState.COMPLETE,
        value=value,
        params={"zero_stage": 1, "bucket": number, MICRO_BATCH: size},
        distributions={
            "zero_stage": CategoricalDistribution([1, 2, 3]),
            "bucket": CategoricalDistribution(list(range(200))),
            MICRO_BATCH: IntDistribution(1, 1024),
        },
    )
    made.number = number
    return made


def lineages(*values: float) -> Lineages:
    return Lineages(group([trial(number, value) for number, value in enumerate(values)]).values())


def test_rates_that_are_not_positive_and_few_measurements_teach_nothing() -> None:
    assert effects_of(lineages(1.0, 2.0), UP) is None
    assert effects_of(lineages(1.0, 2.0, 0.0), UP) is None
    assert effects_of(lineages(1.0, 2.0, 3.0), UP) is not None
    assert effects_of(lineages(*[1.0] * 150, 0.0, *[1.0] * 40), UP) is None


def test_of_many_measurements_the_best_and_the_latest_are_looked_at() -> None:
    result = effects_of(lineages(5.0, *[1.0] * 180, 2.0), UP)
    assert result is not None
    assert len(result._params) <= 100
    assert {param["bucket"] for param in result._params} >= {0, 181}


def test_a_duration_is_better_where_it_is_shorter() -> None:
    known = Lineages(group([trial(0, 4.0, 8), trial(1, 1.0, 2), trial(2, 2.0, 4)]).values())
    result = effects_of(known, DOWN)
    assert result is not None
    assert result.best_size == 2
