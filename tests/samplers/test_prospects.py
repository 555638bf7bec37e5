"""What a launch, and the search, may still gain: expectations against simulation, draws, doublings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optuna_dsat.guided.acquisition import (
    Acquisition,
    Prospects,
    expected_improvement,
    heavy_tailed_improvement,
    learnt_spread,
)
from optuna_dsat.guided.sizes import outgrown_size, paying_sizes

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


MEANS = np.array([-0.05, 0.0, 0.02])
SPREADS = np.array([0.02, 0.05, 0.01])
DRAWS = 400_000


def test_the_expected_improvement_is_the_mean_of_what_normal_draws_gain() -> None:
    drawn = MEANS + SPREADS * np.random.default_rng(0).standard_normal((DRAWS, 3))
    assert expected_improvement(MEANS, SPREADS) == pytest.approx(np.maximum(0, drawn).mean(axis=0), rel=0.03, abs=1e-5)


def test_a_heavy_tailed_improvement_is_the_mean_of_what_students_draws_gain() -> None:
    drawn = MEANS + SPREADS * np.random.default_rng(0).standard_t(3, (DRAWS, 3))
    result = heavy_tailed_improvement(MEANS, SPREADS)
    assert result == pytest.approx(np.maximum(0, drawn).mean(axis=0), rel=0.03)
    assert (result > expected_improvement(MEANS, SPREADS)).all()


def test_a_noisy_measurement_moves_the_posterior_mean_by_as_much_as_it_teaches() -> None:
    dice = np.random.default_rng(0)
    true = 0.01 * dice.standard_normal(DRAWS)
    for noise_sd in (1e-6, 0.01, 0.04):
        measured = true + noise_sd * dice.standard_normal(DRAWS)
        moved = measured * 0.01**2 / (0.01**2 + noise_sd**2)
        assert learnt_spread(np.array([0.01**2]), noise_sd**2) == pytest.approx(moved.std(), rel=0.02)


def test_costs_below_a_start_do_not_decide_between_trials_that_continue() -> None:
    each = {"continues": np.array([True, True]), "log_objective": np.zeros(2), "spread": np.ones(2), "fits": np.ones(2)}
    offered = Acquisition(over=0.0, start_s=60.0, gain=np.array([0.2, 0.3]), cost_s=np.array([2.0, 4.0]), **each)
    assert np.argmax(offered.value) == 0
    assert np.argmax(offered.value_of_starts) == 1
    assert offered.chance == pytest.approx([0.5, 0.5])
    assert offered.take(np.array([1])).joined(offered).gain == pytest.approx([0.3, 0.2, 0.3])


STEEP, FLAT = 0.3, 0.01
"""Logarithms of what doublings gained: a third, and a per cent."""


@pytest.mark.parametrize(
    ("launches", "expected"),
    [
        ([(0, 8, STEEP), (0, 16, STEEP)], [np.inf, np.inf, np.inf]),
        ([(0, 8, STEEP), (0, 16, FLAT), (0, 32, FLAT)], [16, 32, 32]),
        ([(0, 8, FLAT)], [np.inf, np.inf, np.inf]),
        ([(0, 8, STEEP), (0, 15, FLAT)], [np.inf, np.inf, np.inf]),
        ([(0, 8, STEEP), (0, 16, FLAT), (1, 20, STEEP)], [16, 40, 32]),
        ([(0, 8, STEEP), (0, 16, FLAT), (1, 32, STEEP), (1, 64, FLAT)], [16, 64, 128]),
    ],
)
def test_a_structure_ends_where_a_doubling_gained_too_little(
    launches: list[tuple[int, int, float]], expected: list[float]
) -> None:
    structure, size, gain = (np.array(column) for column in zip(*launches, strict=True))
    result = paying_sizes(structure, size.astype(float), gain, count=3)
    assert result.tolist() == expected


@pytest.mark.parametrize(
    ("launches", "expected"),
    [
        ([], 0),
        ([(0, 8, 0.0), (0, 16, STEEP)], 8),
        ([(0, 8, 0.0), (0, 15, STEEP)], 0),
        ([(0, 8, 0.0), (0, 16, FLAT)], 0),
        ([(0, 8, 0.0), (1, 16, STEEP)], 0),
        ([(0, 8, 0.0), (0, 16, STEEP), (0, 32, 2 * STEEP)], 16),
        ([(0, 8, 0.0), (0, 16, STEEP), (1, 8, 2 * STEEP)], 0),
    ],
)
def test_sizes_are_outgrown_where_a_doubling_paid_and_led_to_the_best(
    launches: list[tuple[int, int, float]], expected: int
) -> None:
    structure, size, mean = (np.array([launch[place] for launch in launches]) for place in range(3))
    assert outgrown_size(structure, size, mean) == expected
