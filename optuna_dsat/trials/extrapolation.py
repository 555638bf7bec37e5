"""Optimistic bound on the metric of untried micro-batches of a lineage: pure functions.

A step of micro-batch m takes about ``t(m) = a + b m`` seconds: a fixed part (optimizer step, communication of
gradients and parameters, launch overhead) and a part per sample. A rate, ``T(m) = c m / t(m)``, therefore
increases and saturates; a duration increases. Both are bounded by the cases ``a = 0`` and ``b = 0``: a rate grows at
most in proportion to m. Known error of the affine model: it ignores memory pressure and kernels that change with the
shape, so a measured decrease of the rate with m is used as measured, as the far side of a peak.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from optuna.study import StudyDirection

__all__ = ["optimistic_bound"]


def optimistic_bound(
    points: Sequence[tuple[int, float]],
    low: int,
    high: int,
    *,
    direction: StudyDirection,
    margin: float = 0.0,
) -> float:
    """Return an optimistic bound on the metric of micro-batches in [low, high], in the metric's unit.

    For a rate (maximize):

    - without points: infinity;
    - with a single point ``(m, T)``: the linear bound ``T * max(high / m, 1)``;
    - if a larger micro-batch was measured to be slower than a smaller by more than ``margin``: the rate at the largest
      measured micro-batch;
    - otherwise ``a`` and ``b`` are fitted to ``m / T`` (least squares, clipped at 0), and the bound is the rate at
      ``high``, limited to the linear bound.

    For a duration (minimize): the duration of the largest measured micro-batch below ``low``, a lower bound for larger
    micro-batches; if all measured micro-batches are larger, their shortest duration scaled in proportion to the
    micro-batch.

    An empty interval gives the worst possible value. Metrics that are not positive and finite give the best possible
    value, because they do not allow extrapolation.

    Args:
        points: (micro-batch, metric) of the measurements.
        low: Smallest remaining micro-batch.
        high: Largest remaining micro-batch.
        direction: Direction of the metric.
        margin: Relative difference of two metrics that counts as real.
    """
    maximize = direction == StudyDirection.MAXIMIZE
    best_possible = math.inf if maximize else -math.inf
    if low > high:
        return -best_possible
    if not points or any(not 0 < value < math.inf for _, value in points):
        return best_possible
    sizes = sorted({size for size, _ in points})
    curve = [(m, statistics.fmean(value for size, value in points if size == m)) for m in sizes]
    return _rate(curve, low, high, margin) if maximize else _duration(curve, low)


def _rate(curve: Sequence[tuple[int, float]], low: int, high: int, margin: float) -> float:
    largest, at_largest = curve[-1]
    peak = max(rate for _, rate in curve)
    if low > largest and at_largest < peak * (1 - margin):
        return at_largest
    linear = at_largest * max(high / largest, 1.0)
    if len(curve) == 1:
        return linear
    sizes = [float(size) for size, _ in curve]
    slope, fixed = statistics.linear_regression(sizes, [size / rate for size, rate in curve])
    if slope <= 0:
        return linear
    if fixed < 0:
        return peak  # the fitted rate decreases with the micro-batch
    return min(max(high / (fixed + slope * high), peak), linear)


def _duration(curve: Sequence[tuple[int, float]], low: int) -> float:
    below = [duration for size, duration in curve if size < low]
    if below:
        return below[-1]
    size, duration = curve[0]
    return duration * min(low / size, 1.0)
