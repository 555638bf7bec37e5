"""What a search may still gain, by draws of a joint posterior."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optuna_dsat.guided.acquisition import expected_improvement, learnt_spread
from optuna_dsat.guided.prospects import Prospects

SD = 0.05


def one_open(*, mean: float, noise: float = 0.0, runs: float = 1.0) -> Prospects:
    """One configuration that was not measured, and one that is known for certain."""
    covariance = np.diag([SD**2, 0.0])
    return Prospects(np.array([mean, 0.0]), covariance, runs=np.array([runs]), held=1, noise_variance=noise)


@pytest.mark.parametrize("mean", [-0.05, 0.0, 0.02])
@pytest.mark.parametrize("noise", [1e-8, SD**2])
def test_one_launch_of_one_configuration_is_worth_its_expected_improvement(mean: float, noise: float) -> None:
    spread = learnt_spread(np.array([SD**2]), noise)
    expected = float(expected_improvement(np.array([mean]), spread)[0])
    assert one_open(mean=mean, noise=noise).worth_of_launches(1) == pytest.approx(expected, abs=0.1 * SD)


def test_what_remains_is_the_quantile_of_the_gain_of_what_runs() -> None:
    assert one_open(mean=0.0).remaining() == pytest.approx(1.2816 * SD, rel=0.2)
    assert one_open(mean=0.0, runs=0.0).remaining() == 0.0
    assert one_open(mean=1.0, runs=0.0).worth_of_launches(1) == 0.0


def many(count: int, *, noise: float) -> Prospects:
    """Some configurations alike that were not measured, and one that is known."""
    covariance = np.diag([*np.full(count, SD**2), 0.0])
    return Prospects(np.zeros(count + 1), covariance, runs=np.ones(count), held=count, noise_variance=noise)


@pytest.mark.parametrize("noise", [0.02**2, 0.2**2])
def test_more_launches_gain_more_though_less_than_all_that_may_be_left(noise: float) -> None:
    prospects = many(40, noise=noise)
    worth = [prospects.worth_of_launches(launches) for launches in (1, 4, 16, 40)]
    assert 0 < worth[0] < worth[1] < worth[2] < worth[3] < prospects.remaining()


def test_launches_that_teach_nothing_gain_only_what_is_expected_without_them() -> None:
    assert many(10, noise=1e6).worth_of_launches(10) == pytest.approx(0.0, abs=1e-4)
    assert one_open(mean=0.03, noise=1e6).worth_of_launches(1) == pytest.approx(0.03, abs=1e-4)


def test_configurations_alike_are_measured_for_each_other() -> None:
    """Of ten that differ in nothing the noise is averaged out; of ten that share nothing it is not."""
    alike = np.full((11, 11), SD**2)
    alike[10], alike[:, 10] = 0.0, 0.0
    noise = SD**2
    result = Prospects(np.zeros(11), alike, runs=np.ones(10), held=10, noise_variance=noise).worth_of_launches(10)
    spread = learnt_spread(np.array([SD**2]), noise / 10)
    assert result == pytest.approx(float(expected_improvement(np.zeros(1), spread)[0]), rel=0.2)
    assert result < SD / math.sqrt(2 * math.pi) * 1.1
