"""How large a micro-batch may pay, by what doublings gained."""

from __future__ import annotations

import numpy as np
import pytest

from optuna_dsat.guided.sizes import paying_sizes

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
