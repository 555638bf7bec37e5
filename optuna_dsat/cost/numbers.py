"""The type of the arrays of numbers in the cost models and in guided search."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt

__all__ = ["Numbers"]

Numbers: TypeAlias = npt.NDArray[Any]
