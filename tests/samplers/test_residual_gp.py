"""What residuals teach of knobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optuna_dsat.cost.numbers import Numbers
from optuna_dsat.guided.residual_gp import CPU_NOISE_SD, NOISE_SD, Points, ResidualGP, knob_kernel

PRIOR_FACTOR = 1.0
EFFECT = 0.05


def points_of(flag: Numbers, launch: Numbers) -> Points:
    """Return configurations that differ in a flag."""
    count = len(flag)
    return Points(
        row=flag,
        structure=np.zeros(count, dtype=np.int64),
        kinds=np.zeros((count, 3)),
        knobs=flag[:, None],
        structure_effect=np.zeros(count),
        knob_effects=np.zeros((count, 1)),
        micro_batch=np.full(count, 8.0),
        fill=np.full(count, 0.5),
        log_objective=np.zeros(count),
        latency=np.ones(count),
        coefficient_factors=np.zeros((count, 1)),
        earlier=np.zeros(count),
        launch=launch,
    )


def learnt(launches: int, *, effect: float) -> float:
    """Return the factor on the variance of a flag that every other launch has, and that has an effect on the metric."""
    flag = np.arange(launches) % 2
    points = points_of(flag, np.arange(launches))
    noise = 0.004 * np.random.default_rng(0).standard_normal(launches)
    result = ResidualGP(points, effect * flag + noise, [knob_kernel([False, True])])
    return result.factors["knob 0"]


def test_a_few_launches_without_a_difference_do_not_prove_that_a_knob_does_nothing() -> None:
    few, many = learnt(2, effect=0.0), learnt(20, effect=0.0)
    assert 0.5 * PRIOR_FACTOR < few < PRIOR_FACTOR
    assert many < few


@pytest.mark.parametrize("launches", [4, 20])
def test_a_knob_that_makes_a_difference_is_believed_to(launches: int) -> None:
    assert learnt(launches, effect=EFFECT) > PRIOR_FACTOR > learnt(launches, effect=0.0)


def shared_luck(launch: list[int], *, noise: float = 0.03) -> ResidualGP:
    """Return the posterior of launches with luck that each measured a configuration with and without a flag."""
    count = len(launch)
    flag = np.arange(count) % 2
    rng = np.random.default_rng(0)
    luck = noise * np.array([rng.standard_normal() for _ in range(max(launch) + 1)])[launch]
    points = points_of(flag, np.array(launch))
    measured = 0.01 * flag + luck + 0.1 * noise * rng.standard_normal(count)
    return ResidualGP(points, measured, [knob_kernel([False, True])])


def test_the_luck_of_a_launch_cancels_between_its_measurements() -> None:
    def difference(result: ResidualGP) -> tuple[float, float]:
        means, covariance = result.joint(result.points.take(np.arange(2)))
        return means[1] - means[0], covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]

    together, apart = shared_luck([0, 0, 1, 1, 2, 2, 3, 3]), shared_luck(list(range(8)))
    (gain, variance), (_, usual) = difference(together), difference(apart)
    assert gain == pytest.approx(0.01, abs=0.003)
    assert variance < usual / 3
    assert together.point_variance < together.noise_variance / 5


def test_many_measurements_of_a_launch_are_no_confirmations_of_its_level() -> None:
    def variance(launch: list[int]) -> float:
        result = shared_luck(launch)
        return float(result.joint(result.points.take(np.arange(1)))[1][0, 0])

    assert variance([0] * 8) > variance(list(range(8)))


def test_a_measurement_in_a_launch_is_worth_more_than_in_another_where_the_level_is_known_to_it() -> None:
    result = shared_luck([0, 0, 0, 1, 2, 3, 4, 5])
    new = result.points.take(np.arange(1))
    assert result.change_within(0, new).shape == (1,)
    assert np.all(np.isfinite(result.change_within(0, new)))


def test_a_difference_between_two_launches_on_cpus_is_mostly_their_noise() -> None:
    points = points_of(np.arange(2), np.arange(2))

    def gain(noise_sd: float) -> float:
        result = ResidualGP(points, np.array([0.0, 0.1]), [knob_kernel([False, True])], noise_sd=noise_sd)
        return float(result.posterior_means[1] - result.posterior_means[0])

    assert gain(CPU_NOISE_SD) < 0.03 < gain(NOISE_SD)


def test_a_drop_at_one_micro_batch_says_little_about_others() -> None:
    sizes = np.array([8.0, 64.0, 512.0, 568.0, 640.0, 704.0, 768.0])
    points = replace(points_of(np.zeros(7, dtype=np.int64), np.zeros(7, dtype=np.int64)), micro_batch=sizes)
    measured = np.array([-0.1, -0.06, -0.05, -0.03, -0.01, 0.0, -0.4])
    result = ResidualGP(points, measured, [])
    assert sizes[np.argmax(result.posterior_means)] == 704
    assert result.posterior_means[5] - result.posterior_means[2] == pytest.approx(0.05, abs=0.02)
