"""Remaining micro-batches of a lineage's bisection: pure functions.

The bisection searches for the edge, the largest micro-batch that fits. It stops when

- a larger micro-batch was measured to be slower: the best micro-batch is between its neighbours, see ``peak_gap``;
- the interval between the largest micro-batch that fits and the smallest that does not fit is below ``EDGE_WIDTH``
  relative to the largest that fits: a saturating rate gains less;
- the optimistic bound of the remaining micro-batches (``optuna_dsat.trials.extrapolation``) is worse than the best
  metric of the study.

The last two rules apply to metrics to maximize. Durations always grow with the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from optuna.distributions import IntDistribution
from optuna.study import StudyDirection

from optuna_dsat.trials.extrapolation import optimistic_bound
from optuna_dsat.trials.lineage import PEAK_MARGIN, Lineage, past_peak, peak_gap, search_interval, unused_micro_batches

__all__ = ["EDGE_WIDTH", "edge_interval", "ended", "refine"]

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
