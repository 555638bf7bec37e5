"""How large a micro-batch is worth a launch, whatever the memory holds: pure functions over lineages.

Sizes are reached by doubling from those that ran before, so that a script whose own launch takes two seconds is not
launched with all the samples that memory holds. A structure (ZeRO stage and offload) begins no higher than twice what
ran before the study, or twice what paid for another structure: a size that was measured to gain over its half. From
there a launch may take twice the largest micro-batch that fitted the structure. Once a doubling was measured to gain
less than ``LEAST_GAIN``, the structure goes no higher.
"""

from __future__ import annotations

from collections.abc import Sequence

from optuna.distributions import IntDistribution
from optuna.study import StudyDirection

from optuna_dsat.trials.lineage import Lineage, unused_micro_batches
from optuna_dsat.trials.lineage_index import Lineages, StructureGroup

__all__ = ["LEAST_GAIN", "within_reach"]

LEAST_GAIN = 0.02
"""Relative gain of a doubling below which a larger micro-batch is not worth a launch."""


def within_reach(
    lineage: Lineage,
    lineages: Lineages,
    distribution: IntDistribution,
    *,
    proven: Sequence[int],
    direction: StudyDirection,
) -> int:
    """Return the largest micro-batch of a lineage that may be launched next.

    Where the distribution allows none between what fitted and its double, the next that it allows is in reach.

    Args:
        lineage: The lineage, with or without trials.
        lineages: The lineages of the study.
        distribution: Distribution of the micro-batch.
        proven: Micro-batches that ran before the study, such as the user's own; one at which a lineage of the study
            was too large does not count.
        direction: Direction of the metric.
    """
    group = lineages.structure_group(lineage.params)
    flat = None if group is None else _plateau(group, direction)
    if flat is not None:
        return flat
    paid, too_large = _known(lineages, direction)
    trusted = max((size for size in proven if too_large is None or size < too_large), default=0)
    fitted = max(trusted, 0 if group is None else _largest_fit(group))
    largest = max(fitted, paid)
    above = unused_micro_batches(largest + 1, distribution.high, distribution)
    return max(2 * largest, distribution.low, above[0] if above else 0)


def _known(lineages: Lineages, direction: StudyDirection) -> tuple[int, int | None]:
    """Return the largest micro-batch that paid for any lineage, and the smallest that was too large for one.

    Of durations, which grow with the micro-batch, the largest that fitted counts.
    """

    def find() -> tuple[int, int | None]:
        if direction == StudyDirection.MINIMIZE:
            paid = max((_largest_fit(group) for group in lineages.structures.values()), default=0)
        else:
            paid = max((_doublings(one)[0] for one in lineages.values()), default=0)
        too_large = (one.smallest_too_large for one in lineages.values() if one.smallest_too_large is not None)
        return paid, min(too_large, default=None)

    return lineages.derived(("paid and too large", direction), find)


def _largest_fit(group: StructureGroup) -> int:
    """Return the largest micro-batch that fitted a structure, 0 if none did."""

    def find() -> int:
        return max((one.largest_fit for one in group.members.values() if one.largest_fit is not None), default=0)

    return group.derived("fitted", find)


def _plateau(group: StructureGroup, direction: StudyDirection) -> int | None:
    """Return the smallest micro-batch at which a doubling gained too little for a structure, None without one.

    Only metrics to maximize are judged, each against smaller micro-batches of the same knobs.
    """
    if direction == StudyDirection.MINIMIZE:
        return None

    def find() -> int | None:
        return min((flat for one in group.members.values() if (flat := _doublings(one)[1]) is not None), default=None)

    return group.derived("plateau", find)


def _doublings(lineage: Lineage) -> tuple[int, int | None]:
    """Return what doublings of a lineage gained: the largest micro-batch before the first without gain, and that one.

    Each is compared with the best at half its size or less. 0 where none gained, None where all did.
    """

    def find() -> tuple[int, int | None]:
        points, paid = sorted(lineage.points()), 0
        for size, value in points:
            smaller = [other for at, other in points if 2 * at <= size]
            if smaller and value < (1 + LEAST_GAIN) * max(smaller):
                return paid, size
            if smaller:
                paid = size
        return paid, None

    return lineage.derived("doublings", find)
