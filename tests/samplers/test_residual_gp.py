"""What residuals teach of knobs."""

from __future__ import annotations

import numpy as np
import pytest

from optuna_dsat.guided.residual_gp import Points, ResidualGP, knob_kernel

PRIOR_FACTOR = 1.0
EFFECT = 0.05


def learnt(launches: int, *, effect: float) -> float:
    """Return the factor on the variance of a flag that every other launch has, and that has an effect on the metric."""
    flag = np.arange(launches) % 2
    points = Points(
        row=flag,
        structure=np.zeros(launches, dtype=np.int64),
        knobs=flag[:, None],
        structure_effect=np.zeros(launches),
        knob_effects=np.zeros((launches, 1)),
        micro_batch=np.full(launches, 8.0),
        fill=np.full(launches, 0.5),
        log_objective=np.zeros(launches),
        latency=np.ones(launches),
        coefficient_factors=np.zeros((launches, 1)),
        earlier=np.zeros(launches),
    )
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
