"""What the samplers ``binary`` and ``random`` draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.samplers import BinarySearchSampler, LineageRandomSampler
from optuna_dsat.trials import attributes
from optuna_dsat.trials.bisection import EDGE_WIDTH
from optuna_dsat.trials.lineage import MICRO_BATCH, PLAN_ATTR, group


def planner(largest: Callable[[], int], seen: list[Any] | None = None) -> Any:
    """Return a planner that draws nothing and expects the same micro-batch to fit everywhere."""

    def largest_fit(history: Sequence[FrozenTrial], params: Mapping[str, Any]) -> int:
        if seen is not None:
            seen.append((dict(params), len(history)))
        return largest()

    return SimpleNamespace(largest_fit=largest_fit, largest_worth=lambda *_: None, draw=lambda *_, **__: None)


def sizes(study: Any) -> list[int]:
    return [t.params[MICRO_BATCH] for t in study.trials]


@pytest.mark.parametrize("edge", [0, 1, 2, 31, 32, 33, 63, 64])
def test_bisection_finds_the_edge_in_at_most_log2_launches(kit: SimpleNamespace, edge: int) -> None:
    study = kit.create(BinarySearchSampler(seed=0))
    only = partial(kit.suggest, stages=(1,), wide=False)
    driver = kit.Driver(study, suggest=only, edge=lambda _: edge)
    while not study.sampler.exhausted(study):
        driver.run(1)
    (lineage,) = group(study.trials).values()
    assert (lineage.largest_fit or 0) == pytest.approx(edge, rel=EDGE_WIDTH)
    assert len(study.trials) <= math.floor(math.log2(64)) + 1


def test_it_starts_in_the_middle_and_follows_the_answers(kit: SimpleNamespace) -> None:
    study = kit.create(BinarySearchSampler(seed=0))
    kit.Driver(study, suggest=partial(kit.suggest, stages=(2,), wide=False)).run(5)
    assert sizes(study) == [32, 16, 24, 20, 22]  # the driver's edge of ZeRO 2 is 21: less than 5% more than 20
    assert study.sampler.exhausted(study)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 8), (2.0, 15), (0.5, 4), (0.01, 1), (100.0, 48)], ids=str)
def test_the_ceiling_is_the_memory_models_times_the_factor(kit: SimpleNamespace, factor: float, expected: int) -> None:
    seen: list[tuple[Mapping[str, Any], int]] = []
    sampler = BinarySearchSampler(seed=0, planner=planner(lambda: 10, seen), search_range_factor=factor)
    study = kit.create(sampler)
    kit.Driver(study, suggest=partial(kit.suggest, stages=(1,), wide=False)).run(1)
    assert sizes(study) == [expected]
    assert seen == [({"zero_stage": 1}, 0)]


def test_a_raised_ceiling_reopens_a_lineage(kit: SimpleNamespace) -> None:
    largest = 4
    sampler = BinarySearchSampler(seed=0, planner=planner(lambda: largest))
    study = kit.create(sampler)
    driver = kit.Driver(study, suggest=partial(kit.suggest, stages=(1,), wide=False))
    driver.run(2)
    assert sizes(study) == [3, 4]
    assert sampler.exhausted(study)
    largest = 8
    assert not sampler.exhausted(study)
    driver.run(1)
    assert sizes(study)[-1] == 6


def test_the_first_lineage_of_a_structure_opens_where_the_best_of_the_study_was(kit: SimpleNamespace) -> None:
    study = kit.create(BinarySearchSampler(seed=0, planner=planner(lambda: 64)))
    kit.Driver(study, edge=lambda _: 40).run(30)
    seen: set[str] = set()
    for lineage in group(study.trials).values():
        first, earlier = lineage.trials[0], study.trials[: lineage.first_number]
        if seen and lineage.structure_key not in seen:
            best = max((trial for trial in earlier if trial.values), key=lambda trial: trial.values[0])
            assert first.params[MICRO_BATCH] == best.params[MICRO_BATCH] >= 39
        seen.add(lineage.structure_key)
    assert len(seen) > 1


def test_a_bisection_that_passed_a_peak_goes_back_to_it(kit: SimpleNamespace) -> None:
    study = kit.create(BinarySearchSampler(seed=0), direction="maximize")
    only = partial(kit.suggest, stages=(3,), wide=False)
    driver = kit.Driver(study, suggest=only, edge=lambda _: 64, metric=lambda p: 500.0 - (p[MICRO_BATCH] - 11) ** 2 / 8)
    driver.run(10)
    assert sizes(study)[:4] == [32, 48, 16, 8]  # 48 is slower than 32, 32 than 16
    assert study.best_value >= 0.99 * 500.0
    assert study.sampler.exhausted(study)


def sizes_by_bucket(kit: SimpleNamespace, **driven: Any) -> dict[int, list[int]]:
    """Return the micro-batches of lineages of one structure by their buckets; 5e7 is the first."""
    study = kit.create(BinarySearchSampler(seed=0))
    study.enqueue_trial({"zero_stage": 2, "offload_optimizer": "none", "reduce_bucket_size": int(5e7)})
    driver = kit.Driver(study, suggest=partial(kit.suggest, stages=(2,)), **driven)
    while not study.sampler.exhausted(study):
        driver.run(1)
    result: dict[int, list[int]] = {}
    for trial in study.trials:
        if trial.params["offload_optimizer"] == "none":
            result.setdefault(trial.params["reduce_bucket_size"], []).append(trial.params[MICRO_BATCH])
    return result


def test_new_lineages_open_where_the_best_of_their_structure_was(kit: SimpleNamespace) -> None:
    first, second, third = sizes_by_bucket(kit).values()
    assert first == [32, 16, 24, 20, 22]  # 20 fits, 22 does not
    assert second == [20, 21]  # beyond what the first showed to be too large nothing is tried
    assert third == [21]


def test_a_lineage_ends_once_it_cannot_win(kit: SimpleNamespace) -> None:
    def halved(knobs: Mapping[str, Any]) -> float:
        return float(kit.rate(knobs) / (1 if knobs["reduce_bucket_size"] == int(5e7) else 2))

    result = sizes_by_bucket(kit, metric=halved)
    assert result == {int(5e7): [32, 16, 24, 20, 22], int(5e6): [20], int(5e8): [20]}


def test_a_duration_is_searched_below_the_best_only_after_the_edge_is_known(kit: SimpleNamespace) -> None:
    study = kit.create(BinarySearchSampler(seed=0), direction="minimize")
    only = partial(kit.suggest, stages=(3,), wide=False)
    driver = kit.Driver(study, suggest=only, metric=lambda p: 1.0 + p[MICRO_BATCH])
    driver.run(12)
    assert sizes(study)[:6] == [32, 48, 40, 36, 34, 33]  # the edge first: 33 fits
    assert study.best_params[MICRO_BATCH] == 1


def test_broken_configurations_are_left(kit: SimpleNamespace) -> None:
    study = kit.create(BinarySearchSampler(seed=0))
    only = partial(kit.suggest, stages=(1, 2), wide=False)
    trial = study.ask()
    knobs = only(trial)
    trial.set_user_attr(attributes.OUTCOME, "invalid_config")
    study.tell(trial, state=TrialState.FAIL)
    kit.Driver(study, suggest=only).run(6)
    assert {t.params["zero_stage"] for t in study.trials[1:]} == {3 - knobs["zero_stage"]}


def test_the_plan_is_stored_before_parameters_are_suggested(kit: SimpleNamespace) -> None:
    study = kit.create(BinarySearchSampler(seed=0))
    kit.Driver(study, suggest=partial(kit.suggest, stages=(2,), wide=False)).run(1)
    study.ask()
    plan = study.trials[-1].system_attrs[PLAN_ATTR]
    assert plan["lineage"] == {"zero_stage": 2}
    assert (plan["low"], plan["micro_batch"], plan["high"]) == (1, 16, 31)


def test_nothing_is_exhausted_while_a_trial_is_in_flight(kit: SimpleNamespace) -> None:
    study = kit.create(BinarySearchSampler(seed=0))
    only = partial(kit.suggest, stages=(1,), wide=False, high=1)
    driver = kit.Driver(study, suggest=only)
    trial, knobs = driver.ask()
    assert not study.sampler.exhausted(study, 1)
    driver.answer(trial, knobs)
    assert study.sampler.exhausted(study, 1)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_a_factor_must_be_positive(factor: float) -> None:
    with pytest.raises(ValueError, match="search_range_factor must be above 0"):
        BinarySearchSampler(search_range_factor=factor)


@pytest.mark.parametrize("budget", [1, 3])
def test_a_lineage_has_its_budget_and_no_more(kit: SimpleNamespace, budget: int) -> None:
    study = kit.create(LineageRandomSampler(seed=0, trials_per_random_config=budget))
    kit.Driver(study).run(30)
    counts = [len(o.trials) for o in group(study.trials).values()]
    assert max(counts) == budget


def test_bounds_follow_the_answers(kit: SimpleNamespace) -> None:
    study = kit.create(LineageRandomSampler(seed=0, trials_per_random_config=9))
    kit.Driver(study, suggest=partial(kit.suggest, stages=(2,), wide=False)).run(8)
    (lineage,) = group(study.trials).values()
    low, high = 1, 64
    for trial in lineage.trials:
        plan = trial.system_attrs[PLAN_ATTR]
        assert (plan["low"], plan["high"]) == (low, high)
        assert low <= lineage.size(trial) <= high
        if lineage.size(trial) <= 21:
            low = lineage.size(trial) + 1
        else:
            high = lineage.size(trial) - 1
        if low > high:
            break


def test_a_success_at_the_soft_ceiling_raises_it(kit: SimpleNamespace) -> None:
    two: Any = SimpleNamespace(largest_fit=lambda *_: 2, largest_worth=lambda *_: None, draw=lambda *_, **__: None)
    sampler = LineageRandomSampler(seed=0, planner=two)
    study = kit.create(sampler)
    kit.Driver(study, suggest=partial(kit.suggest, stages=(3,), wide=False)).run(5)
    result = [t.params[MICRO_BATCH] for t in study.trials]
    assert result[0] <= 2
    assert max(result) > 4
    assert max(result) <= 64


def test_the_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="trials_per_random_config must be at least 1, not 0"):
        LineageRandomSampler(trials_per_random_config=0)
