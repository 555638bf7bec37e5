"""Statistics of launches in rounds: paired ratios with their intervals, and the noise from launch to launch.

Metrics differ from launch to launch by a factor, so all is computed on logarithms. Two configurations are compared by
their differences within rounds (NIST/SEMATECH e-Handbook, 7.3.1.1, analysis of paired observations): what slows a whole
round cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optuna_dsat.launch.student_t import student_t_975

__all__ = [
    "PRECISION",
    "Noise",
    "Ratio",
    "is_precise",
    "mean_in_rounds",
    "noise_of_search",
    "paired_ratio",
    "pooled_noise",
]

PRECISION = 0.02
"""Half the width of the interval of a speed-up's logarithm at which it counts as known."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as good as another a configuration is; above 1 is better whatever the metric."""

    value: float
    low: float | None
    """Lower end of the 95% confidence interval; None if fewer than two rounds, or the search alone, compare them."""
    high: float | None
    """Its upper end."""
    rounds: int
    """Rounds in which both were measured; 0 for values of the search."""

    @property
    def half_width(self) -> float:
        """Half the width of the interval of the ratio's logarithm; infinite without an interval."""
        if self.low is None or self.high is None:
            return math.inf
        return (math.log(self.high) - math.log(self.low)) / 2

    @property
    def surely_above_1(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1

    def surely_below(self, value: float) -> bool:
        """Whether the whole interval lies below a ratio."""
        return self.high is not None and self.high < value


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What launches of one configuration differ by, drift between rounds taken out."""

    relative_sd: float
    """Standard deviation of the metric's logarithm: relative to the metric."""
    launches: int
    """Launches that it comes from."""
    degrees: int
    """Its degrees of freedom."""


def paired_ratio(
    values: Mapping[int, float], others: Mapping[int, float], *, maximize: bool, t: float | None = None
) -> Ratio | None:
    """Return how many times as good as another a configuration is, by the rounds in which both were measured.

    The geometric mean of the ratios within rounds, with Student's t interval of their logarithms.

    Args:
        values: Round -> metric of the configuration.
        others: Round -> metric of the other.
        maximize: Whether a larger metric is better.
        t: Quantile of Student's t; None for that of a 95% interval.

    Returns:
        The ratio; None if no round measured both.
    """
    sign = 1.0 if maximize else -1.0
    logs = [sign * math.log(values[one] / others[one]) for one in sorted(values.keys() & others.keys())]
    if not logs:
        return None
    mean, count = statistics.fmean(logs), len(logs)
    if count < 2:
        return Ratio(value=math.exp(mean), low=None, high=None, rounds=count)
    half = (student_t_975(count - 1) if t is None else t) * statistics.stdev(logs) / math.sqrt(count)
    return Ratio(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), rounds=count)


def mean_in_rounds(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the geometric mean of one configuration's launches with its 95% interval (Student's t, on logarithms).

    The ends are None for a single launch.
    """
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None, None
    half = student_t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def pooled_noise(values: Mapping[int, Mapping[int, float]], *, reference: int) -> Noise | None:
    """Return the noise from launch to launch, pooled over the configurations that were launched in rounds.

    The variance of a difference within rounds is twice that of a launch; variances are weighted by their degrees of
    freedom. What a whole round has in common (a drift of the machine) is in none of them.

    Args:
        values: Configuration -> round -> metric.
        reference: The configuration with which the others are paired.

    Returns:
        The noise; None before any configuration was paired in two rounds.
    """
    squares, degrees, used = 0.0, 0, set()
    for number, own in values.items():
        common = own.keys() & values[reference].keys()
        if number == reference or len(common) < 2:
            continue
        squares += statistics.variance([math.log(own[one] / values[reference][one]) for one in common]) * (
            len(common) - 1
        )
        degrees += len(common) - 1
        used |= {(number, one) for one in common} | {(reference, one) for one in common}
    if not degrees:
        return None
    return Noise(relative_sd=math.sqrt(squares / degrees / 2), launches=len(used), degrees=degrees)


def noise_of_search(values: Mapping[int, Mapping[int, float]], searched: Mapping[int, float]) -> Noise | None:
    """Return the noise of the search: the root mean square of what its measurements differ by from the rounds.

    It contains what the machine as a whole changed by, and what a few steps of a launch do not show.

    Args:
        values: Configuration -> round -> metric.
        searched: Configuration -> metric of the search.

    Returns:
        The noise; None without a configuration that was measured in both.
    """
    logs = [
        math.log(searched[number]) - statistics.fmean(map(math.log, own.values()))
        for number, own in values.items()
        if own and searched.get(number, 0.0) > 0
    ]
    if not logs:
        return None
    square = statistics.fmean(one**2 for one in logs)
    return Noise(relative_sd=math.sqrt(square), launches=len(logs), degrees=len(logs))


def is_precise(ratio: Ratio, noise: Noise | None) -> bool:
    """Whether a ratio is known, by its own rounds and by the noise of all: few rounds may agree by chance."""
    if noise is None or not ratio.rounds:
        return False
    pooled = student_t_975(noise.degrees) * noise.relative_sd * math.sqrt(2 / ratio.rounds)
    return max(ratio.half_width, pooled) <= PRECISION
