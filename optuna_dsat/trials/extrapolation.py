"""What measurements of a lineage promise for micro-batches not tried yet: pure functions.

A step of micro-batch m takes about ``t(m) = a + b m`` seconds: a fixed part (optimizer step, communication of
gradients and parameters, launch overhead) and a part per sample. A rate, ``T(m) = c m / t(m)``, therefore
rises and saturates; a duration rises. Both are bounded by the case ``a = 0`` or ``b = 0``: a rate grows at
most in proportion to m. The known error of the affine model: it does not see memory pressure or kernels that
change with the shape, so a measured fall of the rate with m is taken as it is, as the other side of a peak.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from optuna.study import StudyDirection

__all__ = ["potential"]


def potential(
    points: Sequence[tuple[int, float]],
    low: int,
    high: int,
    *,
    direction: StudyDirection,
    margin: float = 0.0,
) -> float:
    """Return the best metric that micro-batches of [low, high] can plausibly show, in the metric's unit.

    For a rate (maximize): without points, infinity. With one point ``(m, T)`` the linear bound ``T * max(high
    / m, 1)``. With more, ``a`` and ``b`` are fitted to ``m / T`` (least squares, clipped at 0) and the rate
    at ``high`` is returned, but no more than the linear bound; where a larger micro-batch was measured to be
    slower than a smaller one by more than ``margin``, the rate at the largest measured one is what remains.
    For a duration (minimize): the duration of the largest measured micro-batch below ``low``, which larger
    ones do not undercut, or in proportion to the micro-batch where only larger ones were measured. Metrics
    that are not positive promise nothing and everything: the best possible value is returned.

    Args:
        points: (micro-batch, metric) of what was measured.
        low: Smallest micro-batch left to try.
        high: Largest micro-batch left to try.
        direction: What is better.
        margin: Relative difference between two metrics that counts.
    """
    maximize = direction == StudyDirection.MAXIMIZE
    everything = math.inf if maximize else -math.inf
    if low > high:
        return -everything
    if not points or any(not 0 < value < math.inf for _, value in points):
        return everything
    sizes = sorted({size for size, _ in points})
    curve = [(m, statistics.fmean(value for size, value in points if size == m)) for m in sizes]
    return _rate(curve, low, high, margin) if maximize else _duration(curve, low)


def _rate(curve: Sequence[tuple[int, float]], low: int, high: int, margin: float) -> float:
    largest, at_largest = curve[-1]
    peak = max(rate for _, rate in curve)
    if low > largest and at_largest < peak * (1 - margin):
        return at_largest
    linear = max(rate * max(high / size, 1.0) for size, rate in curve[-1:])
    if len(curve) == 1:
        return linear
    sizes = [float(size) for size, _ in curve]
    slope, fixed = statistics.linear_regression(sizes, [size / rate for size, rate in curve])
    if slope <= 0:
        return linear
    if fixed < 0:
        return peak  # the rate does not rise any more
    return min(max(high / (fixed + slope * high), peak), linear)


def _duration(curve: Sequence[tuple[int, float]], low: int) -> float:
    below = [duration for size, duration in curve if size < low]
    if below:
        return below[-1]
    size, duration = curve[0]
    return duration * min(low / size, 1.0)
