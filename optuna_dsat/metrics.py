"""The metrics that can be optimised: names, directions, and the speed-up over a baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

LARGER_IS_BETTER = ("FLOPS_per_gpu", "throughput")
"""FLOP/s per GPU, and samples/s over all ranks."""
SMALLER_IS_BETTER = ("latency", "forward", "backward", "step")
"""Seconds per step: of the whole step and of its phases."""
PER_ELEMENT = ("tokens_per_s", "elements_per_s")
"""Elements of the inputs per second over all ranks, padding included: stated beside the others where inputs are tokens
or vary in size. None can be optimised: padding, which larger batches have more of, would count as work done.
"""
UTILISATION = "MFU"
"""Share of the device's peak FLOPS: stated where the peak is known."""
POWER, PER_JOULE = "power_w", "samples_per_joule"
"""Mean power of the launch's GPUs in watts, and samples/s over it: stated where the driver counts energy."""
METRICS = (*LARGER_IS_BETTER, *SMALLER_IS_BETTER)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A metric, or a ratio of metrics (above 1 is better), with its 95% confidence interval."""

    value: float
    low: float | None = None
    """Lower end; None with fewer than two rounds, or for a value of the search."""
    high: float | None = None
    """Upper end."""
    rounds: int = 0
    """Rounds of a confirmation that measured it; 0 for a value of the search or of a single launch."""

    @property
    def half_width(self) -> float:
        """Half-width of the interval of the logarithm; infinite without an interval."""
        if self.low is None or self.high is None:
            return math.inf
        return (math.log(self.high) - math.log(self.low)) / 2

    @property
    def surely_above_1(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low is not None and self.low > 1

    def widened(self, half_width: float) -> Interval:
        """Return it with a further, independent error of the logarithm, by the half-width of its 95% interval."""
        if self.low is None or self.high is None:
            return self
        more = math.hypot(self.half_width, half_width) - self.half_width
        return replace(self, low=self.low * math.exp(-more), high=self.high * math.exp(more))

    def surely_below(self, value: float) -> bool:
        """Whether the whole interval is below a value."""
        return self.high is not None and self.high < value


def direction_of(metric: str) -> Literal["maximize", "minimize"]:
    """Return the direction in which a metric improves."""
    return "maximize" if metric in LARGER_IS_BETTER else "minimize"


def speed_up(value: float | None, baseline: float | None, *, maximize: bool) -> float | None:
    """Return the ratio by which a value is better than a baseline; None if either is missing or 0."""
    if not value or not baseline:
        return None
    return value / baseline if maximize else baseline / value


def shares_of_linear(rates: Sequence[float | None]) -> list[float | None]:
    """Return the scaling efficiency at each number of devices: the rate of a device over that at the first number."""
    least = next((rate for rate in rates if rate), None)
    return [rate / least if rate and least else None for rate in rates]


_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5% quantile of Student's t for 1, 2, ... degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""


Z_975 = 1.96
"""97.5% quantile of the standard normal distribution: half of the width of its central 95%."""


def student_t_975(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t; that for 30 degrees of freedom where there are more."""
    return _T_975[min(degrees, len(_T_975)) - 1]
