"""What search and rounds say together of finalists."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optuna_dsat.guided.joint_estimate import JointEstimate

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
