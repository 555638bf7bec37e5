"""How large a micro-batch may pay, by what doublings gained."""

from __future__ import annotations

import numpy as np
import pytest

from optuna_dsat.guided.sizes import outgrown_size, paying_sizes

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
