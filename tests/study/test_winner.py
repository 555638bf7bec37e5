"""Which configuration is handed over: the luckiest measurement is not always the best; search and rounds together."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import numpy as np
import optuna
import pytest
from optuna.pruners import NopPruner
from optuna.trial import FrozenTrial

from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.samplers import BinarySearchSampler
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.search.methods import Method
from tests.harness.landscapes import Hill
from tests.harness.small_model import Machine, small_planner, small_space
from tests.harness.studies import StudyBench


def trial(number: int, value: float) -> FrozenTrial:
    result = optuna.trial.create_trial(value=value)
    result.number = number
    return result


def test_trials_are_ranked_by_belief_where_there_is_one() -> None:
    trials = [trial(0, 110.0), trial(1, 99.0), trial(2, 98.0)]
    plain = Method(sampler=BinarySearchSampler(), pruner=NopPruner(), classes=1)
    assert [item.number for item in plain.ranked(trials, maximize=True)] == [0, 1, 2]
    wise = Method(
        sampler=BinarySearchSampler(),
        pruner=NopPruner(),
        classes=1,
        posterior=cast(GuidedPlanner, SimpleNamespace(posterior_means=lambda _: {0: 97.0, 1: 99.0, 2: 98.0})),
    )
    assert [item.number for item in wise.ranked(trials, maximize=True)] == [1, 2, 0]
    assert [item.number for item in wise.ranked(trials, maximize=False)] == [0, 2, 1]


def test_a_lucky_measurement_is_believed_less_than_it_shows() -> None:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    machine, base = Machine(), small_space().completed({"zero_stage": 2, "overlap_comm": True})
    for size in (4, 8, 12, 16, 20, 24):
        study.enqueue_trial({**base, "train_micro_batch_size_per_gpu": size})
        machine.run(study, 1)
    honest = small_planner().posterior_means(study.trials)
    trials = study.get_trials()
    lucky = trials[3]
    assert lucky.values is not None
    true = lucky.values[0]
    lucky.values = [1.06 * true]
    result = small_planner().posterior_means(trials)
    assert honest[3] == pytest.approx(true, rel=0.01)
    assert true < result[3] < 1.045 * true


def test_what_measured_best_is_always_a_finalist(bench: StudyBench) -> None:
    bench.run(bench.spec(method="guided", max_trials=8, confirm=2), Hill(), noise=0.05)
    study = bench.study()
    assert study.best_trial.number in Rounds.of(study.user_attrs).chosen


SEARCHED = JointEstimate(numbers=(4, 7), means=(0.0, 0.02), covariance=((1e-4, 0.0), (0.0, 1e-4)))


def test_both_count_by_how_sure_they_are() -> None:
    rounds = {4: {1: 1.0, 2: 1.0}, 7: {1: 1.0, 2: 1.0}}
    log_ratio, sd = SEARCHED.given(rounds, noise=0.01, maximize=True).log_ratio(7, 4)
    # A difference of 0.02 with variance 2e-4 by the search, of 0 with variance 1e-4 by two rounds.
    assert log_ratio == pytest.approx(0.02 / 3)
    assert sd == pytest.approx(math.sqrt(1 / (1 / 2e-4 + 1 / 1e-4)))


def test_what_a_round_has_in_common_teaches_nothing() -> None:
    calm = {4: {1: 1.0, 2: 1.1}, 7: {1: 1.02, 2: 1.07}}
    slower = {number: {1: result[1], 2: result[2] / 3} for number, result in calm.items()}
    given = [SEARCHED.given(item, noise=0.01, maximize=True) for item in (calm, slower)]
    np.testing.assert_allclose(given[0].means, given[1].means)
    alone = SEARCHED.given({4: {1: 5.0}, 7: {2: 1.0}, 9: {1: 1.0}}, noise=0.01, maximize=True)
    assert (alone.means, alone.covariance) == (SEARCHED.means, SEARCHED.covariance)


def test_a_smaller_metric_is_better_where_it_is_minimised() -> None:
    rounds = {4: {1: 0.5}, 7: {1: 1.0}}
    assert SEARCHED.given(rounds, noise=0.001, maximize=False).log_ratio(4, 7)[0] > 0.6
    assert SEARCHED.given(rounds, noise=0.001, maximize=True).log_ratio(4, 7)[0] < -0.6


def test_trials_whose_errors_are_shared_are_told_apart_by_what_is_not() -> None:
    alike = JointEstimate(numbers=(1, 2), means=(0.0, 0.01), covariance=((0.0101, 0.01), (0.01, 0.0101)))
    assert list(alike.log_ratio(2, 1)) == pytest.approx([0.01, math.sqrt(2e-4)])
