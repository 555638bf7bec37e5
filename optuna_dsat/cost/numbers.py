"""The type of the arrays of numbers in the cost models and in guided search, and their order."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[Any]

_DIGITS, _DECIMALS = 8, 12
"""Digits of a number, and its decimals, that do not depend on a CPU's linear algebra."""


def without_rounding_error(numbers: Numbers) -> Numbers:
    """Return numbers rounded so far that ties are ties on every CPU."""
    mantissa, exponent = np.frexp(numbers)
    result: Numbers = np.round(np.ldexp(np.round(mantissa, _DIGITS), exponent), _DECIMALS)
    return result


def descending(numbers: Numbers) -> Numbers:
    """Return the indices that sort numbers along the last axis, largest first; ties stay in their order."""
    return np.argsort(-without_rounding_error(numbers), kind="stable", axis=-1)
