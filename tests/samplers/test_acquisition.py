"""What a launch is expected to gain, against simulation."""

from __future__ import annotations

import numpy as np
import pytest

from optuna_dsat.guided.acquisition import Acquisition, expected_improvement, heavy_tailed_improvement, learnt_spread

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
