"""How large a micro-batch is worth a launch, whatever the memory holds: pure functions over lineages.

Sizes are reached by doubling from those that ran before, so that a script whose own launch takes two seconds is not
launched with all the samples that memory holds. A structure (ZeRO stage and offload) begins no higher than twice what
ran before the study, or than what paid for another structure. From there a launch may take twice the largest
micro-batch that fitted the structure. Once a doubling was measured to gain less than ``LEAST_GAIN``, the structure goes
no higher.
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
    doubled = max(2 * fitted, distribution.low)
    above = unused_micro_batches(fitted + 1, distribution.high, distribution)
    return max(doubled, paid, above[0] if above else 0)


def _known(lineages: Lineages, direction: StudyDirection) -> tuple[int, int | None]:
    """Return the largest micro-batch that paid for any structure, and the smallest that was too large for a lineage."""

    def find() -> tuple[int, int | None]:
        paid = (
            _largest_fit(group) if (flat := _plateau(group, direction)) is None else flat // 2
            for group in lineages.structures.values()
        )
        too_large = (one.smallest_too_large for one in lineages.values() if one.smallest_too_large is not None)
        return max(paid, default=0), min(too_large, default=None)

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
        found = [size for one in group.members.values() if (size := _first_without_gain(one)) is not None]
        return min(found, default=None)

    return group.derived("plateau", find)


def _first_without_gain(lineage: Lineage) -> int | None:
    """Return the smallest micro-batch that gained too little over the best at half its size or less."""

    def find() -> int | None:
        points = sorted(lineage.points())
        for size, value in points:
            smaller = [other for at, other in points if 2 * at <= size]
            if smaller and value < (1 + LEAST_GAIN) * max(smaller):
                return size
        return None

    return lineage.derived("first without gain", find)
