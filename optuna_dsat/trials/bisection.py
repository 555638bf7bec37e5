"""What a bisection of the micro-batch has left to try in a lineage: pure functions.

The largest micro-batch that fits (the edge) is looked for while that can pay. It cannot any more

- once a larger micro-batch was measured to be slower: the best one lies between its neighbours, see ``peak_gap``;
- where what is left between the largest that fits and the smallest that does not is less than ``EDGE_WIDTH`` of the
  former: a rate that saturates gains less than that;
- where the most that the micro-batches left can plausibly show (``optuna_dsat.trials.extrapolation``) is worse than
the best of
  the study.

The last two are for metrics to maximize. A duration grows with the micro-batch anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from optuna.distributions import IntDistribution
from optuna.study import StudyDirection

from optuna_dsat.trials.extrapolation import potential
from optuna_dsat.trials.lineage import PEAK_MARGIN, Lineage, candidates, past_peak, peak_gap, search_interval

__all__ = ["EDGE_WIDTH", "climb", "ended", "refine"]

EDGE_WIDTH = 0.05
"""The edge is known well enough within this part of the micro-batch."""


def climb(
    lineage: Lineage,
    ceiling: int,
    distribution: IntDistribution,
    *,
    direction: StudyDirection,
    best: float | None = None,
) -> tuple[int, int] | None:
    """Return the bounds (low, high) within which the edge is still worth looking for, None where it is not.

    Args:
        lineage: The lineage.
        ceiling: Largest micro-batch worth trying.
        distribution: Of the micro-batch.
        direction: What is better.
        best: Best metric of the study, None where there is none.
    """
    low, high = search_interval(lineage, ceiling, floor=distribution.low)
    finished = tuple(size for size in lineage.used if size not in lineage.running)
    if not candidates(low, high, distribution, used=finished):
        return None
    if direction == StudyDirection.MINIMIZE:
        return low, high
    if past_peak(lineage, direction) or high - low + 1 <= EDGE_WIDTH * (lineage.largest_fit or 0):
        return None
    if best is not None and potential(lineage.points(), low, high, direction=direction, margin=PEAK_MARGIN) < best:
        return None
    return low, high


def refine(
    lineage: Lineage,
    distribution: IntDistribution,
    *,
    direction: StudyDirection,
    best: float | None = None,
) -> Sequence[int]:
    """Return the unused micro-batches beside a lineage's peak that are still worth trying, ascending.

    Args:
        lineage: The lineage.
        distribution: Of the micro-batch.
        direction: What is better.
        best: Best metric of the study, None where there is none.
    """
    gap = peak_gap(lineage, distribution, direction)
    if not gap or best is None or direction == StudyDirection.MINIMIZE:
        return gap
    below = [point for point in lineage.points() if point[0] < gap[0]]
    promise = potential(below, gap[0], gap[-1], direction=direction)
    return () if below and promise < best else gap


def ended(lineage: Lineage, direction: StudyDirection, best: float | None = None) -> bool:
    """Return whether a bisection has nothing left to try up to the lineage's ceiling, or nothing can help.

    Args:
        lineage: The lineage.
        direction: What is better.
        best: Best metric of the study, None where there is none.
    """

    def find() -> bool:
        distribution, ceiling = lineage.distribution, lineage.ceiling
        if lineage.broken or distribution is None or ceiling is None:
            return lineage.broken
        if climb(lineage, ceiling, distribution, direction=direction, best=best) is not None:
            return False
        return not refine(lineage, distribution, direction=direction, best=best)

    return lineage.derived(("ended", direction, best), find)
