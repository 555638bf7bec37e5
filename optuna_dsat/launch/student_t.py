"""Quantiles of Student's t, for 95% intervals of few values."""

from __future__ import annotations

__all__ = ["student_t_975"]

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5% quantile of Student's t for 1, 2, ... degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""


def student_t_975(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t; that for 30 degrees of freedom where there are more."""
    return _T_975[min(degrees, len(_T_975)) - 1]
