"""Remaining micro-batches of a lineage's bisection: pure functions.

The bisection searches for the edge, the largest micro-batch that fits. It stops when

- a larger micro-batch was measured to be slower: the best micro-batch is between its neighbours, see ``peak_gap``;
- the interval between the largest micro-batch that fits and the smallest that does not fit is below ``EDGE_WIDTH``
  relative to the largest that fits: a saturating rate gains less;
- the optimistic bound of the remaining micro-batches is worse than the best metric of the study.

The last two rules apply to metrics to maximize. Durations always grow with the micro-batch.

The bound: a step of micro-batch m takes about ``t(m) = a + b m`` seconds, a fixed part (optimizer step, communication
of gradients and parameters, launch overhead) and a part per sample. A rate, ``T(m) = c m / t(m)``, therefore
increases and saturates; a duration increases. Both are bounded by the cases ``a = 0`` and ``b = 0``: a rate grows at
most in proportion to m. Known error of the affine model: it ignores memory pressure and kernels that change with the
shape, so a measured decrease of the rate with m is used as measured, as the far side of a peak.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from optuna.distributions import IntDistribution
from optuna.study import StudyDirection

from optuna_dsat.trials.lineage import PEAK_MARGIN, Lineage, past_peak, peak_gap, search_interval, unused_micro_batches


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


EDGE_WIDTH = 0.05
"""Relative width of the interval around the edge at which the search stops."""


def edge_interval(
    lineage: Lineage,
    ceiling: int,
    distribution: IntDistribution,
    *,
    direction: StudyDirection,
    best: float | None = None,
) -> tuple[int, int] | None:
    """Return the remaining interval (low, high) of the search for the edge, None if the search is over."""
    low, high = search_interval(lineage, ceiling, floor=distribution.low)
    finished = tuple(size for size in lineage.used if size not in lineage.running)
    if not unused_micro_batches(low, high, distribution, used=finished):
        return None
    if direction == StudyDirection.MINIMIZE:
        return low, high
    if past_peak(lineage, direction) or high - low + 1 <= EDGE_WIDTH * (lineage.largest_fit or 0):
        return None
    if best is not None and optimistic_bound(lineage.points, low, high, direction=direction, margin=PEAK_MARGIN) < best:
        return None
    return low, high


def refine(
    lineage: Lineage,
    distribution: IntDistribution,
    *,
    direction: StudyDirection,
    best: float | None = None,
) -> Sequence[int]:
    """Return the unused micro-batches next to a lineage's peak that are still worth a launch, ascending."""
    gap = peak_gap(lineage, distribution, direction)
    if not gap or best is None or direction == StudyDirection.MINIMIZE:
        return gap
    below = [point for point in lineage.points if point[0] < gap[0]]
    bound = optimistic_bound(below, gap[0], gap[-1], direction=direction)
    return () if below and bound < best else gap


def ended(lineage: Lineage, direction: StudyDirection, best: float | None = None) -> bool:
    """Return whether a lineage's bisection is over: broken, or no micro-batch up to its ceiling is worth a launch."""
    distribution, ceiling = lineage.distribution, lineage.ceiling
    if lineage.broken or distribution is None or ceiling is None:
        return lineage.broken
    if edge_interval(lineage, ceiling, distribution, direction=direction, best=best) is not None:
        return False
    return not refine(lineage, distribution, direction=direction, best=best)
