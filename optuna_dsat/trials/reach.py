"""Largest micro-batch worth a launch, regardless of memory: pure functions over lineages.

Sizes are reached by doubling from sizes that ran before, so that a script whose usual launch takes two seconds is not
launched with all the samples that fit in memory. A structure (ZeRO stage and offload) starts at most at twice a size
that ran before the study, or twice a size at which another structure was measured to gain over half the size. After
that, a launch may have up to twice the largest micro-batch that fitted the structure. Once a doubling was measured to
gain less than ``LEAST_GAIN``, the structure is not launched at larger sizes. If several lineages doubled to similar
sizes, the mean gain decides, because a single lineage cannot resolve gains of a few per cent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from optuna.distributions import IntDistribution
from optuna.study import StudyDirection

from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import Lineage, unused_micro_batches
from optuna_dsat.trials.lineage_index import Lineages, StructureGroup

__all__ = ["DEAR", "LEAST_GAIN", "within_reach", "worth_its_seconds"]

LEAST_GAIN = 0.02
"""Relative gain of a doubling below which a larger micro-batch is not worth a launch."""
_ALIKE = math.sqrt(2)
"""Largest ratio of micro-batches whose doublings count as equal evidence."""
DEAR = 10.0
"""Largest duration of a launch, relative to the baseline's micro-batch, that requires no matching gain."""


def within_reach(
    lineage: Lineage,
    lineages: Lineages,
    distribution: IntDistribution,
    *,
    proven: Sequence[int],
    direction: StudyDirection,
) -> int:
    """Return the largest micro-batch of a lineage that may be launched next.

    If the distribution has no micro-batch between the largest that fitted and its double, its next value is in reach.

    Args:
        lineage: The lineage, with or without trials.
        lineages: The lineages of the study.
        distribution: Distribution of the micro-batch.
        proven: Micro-batches that ran before the study, such as the baseline's; sizes that were too large for a lineage
            of the study are ignored.
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


def worth_its_seconds(
    lineage: Lineage, lineages: Lineages, *, own: int, profile_steps: int, direction: StudyDirection
) -> float:
    """Return the largest micro-batch of a lineage whose launch is worth its time; infinite if unlimited.

    The time per sample is assumed to equal that at the largest micro-batch measured in the structure, which is an upper
    bound if larger micro-batches are more efficient. Time outside the steps is assumed to be unchanged.

    Args:
        lineage: The lineage, with or without trials.
        lineages: The lineages of the study.
        own: Micro-batch of the baseline.
        profile_steps: Steps of a launch.
        direction: Direction of the metric; if durations are minimized, no launch is too long.
    """
    if direction == StudyDirection.MINIMIZE:
        return math.inf
    known = lineages.derived(("timed", profile_steps), lambda: _timed(lineages.values()))
    usual = min((row.seconds(profile_steps) for row in known if row.micro_batch >= own), default=None)
    group = lineages.structure_group(lineage.params)
    if usual is None or group is None:
        return math.inf
    measured = group.derived("timed", lambda: _timed(group.members.values()))
    if not measured:
        return math.inf
    largest = max(measured, key=lambda row: (row.micro_batch, -row.step_s))
    allowed_s = DEAR * usual * max(1.0, _last_gain(group) / LEAST_GAIN)
    steps_s = profile_steps * largest.step_s / largest.micro_batch
    return max(float(own), (allowed_s - largest.overhead_s) / steps_s)


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """Cost of a measured launch."""

    micro_batch: int
    step_s: float
    overhead_s: float

    def seconds(self, profile_steps: int) -> float:
        return self.overhead_s + profile_steps * self.step_s


def _timed(lineages: Iterable[Lineage]) -> tuple[_Timed, ...]:
    """Return the launches of lineages that measured the seconds of a step."""
    rows = []
    for lineage in lineages:
        for trial in lineage.trials:
            seconds = attributes.step_and_overhead_s(trial)
            if seconds is not None:
                step_s, overhead_s = seconds
                rows.append(_Timed(micro_batch=lineage.size(trial), step_s=step_s, overhead_s=overhead_s))
    return tuple(rows)


def _last_gain(group: StructureGroup) -> float:
    """Return the relative gain of the largest doubling measured in a structure, 0 without any."""

    def find() -> float:
        doublings = (gain for member in group.members.values() for gain in _gains(member))
        return max(doublings, default=(0, 0.0))[1]

    return group.derived("last gain", find)


def _halved(points: Sequence[tuple[int, float]], size: int) -> list[float]:
    """Return the metrics measured at half a micro-batch or less, the reference of its doubling."""
    return [value for at, value in points if 2 * at <= size]


def _known(lineages: Lineages, direction: StudyDirection) -> tuple[int, int | None]:
    """Return the largest micro-batch with a gain in any lineage, and the smallest that was too large for any.

    For durations, which grow with the micro-batch, return the largest that fitted.
    """

    def find() -> tuple[int, int | None]:
        if direction == StudyDirection.MINIMIZE:
            paid = max((_largest_fit(group) for group in lineages.structures.values()), default=0)
        else:
            paid = max((_doublings(lineage)[0] for lineage in lineages.values()), default=0)
        too_large = (
            lineage.smallest_too_large for lineage in lineages.values() if lineage.smallest_too_large is not None
        )
        return paid, min(too_large, default=None)

    return lineages.derived(("paid and too large", direction), find)


def _largest_fit(group: StructureGroup) -> int:
    """Return the largest micro-batch that fitted a structure, else 0."""

    def find() -> int:
        return max(
            (member.largest_fit for member in group.members.values() if member.largest_fit is not None), default=0
        )

    return group.derived("fitted", find)


def _plateau(group: StructureGroup, direction: StudyDirection) -> int | None:
    """Return the smallest micro-batch at which doublings gained too little for a structure, or None.

    A flat doubling is averaged with the gains of other lineages at similar sizes (``_ALIKE``); otherwise the lineage
    with the least favourable noise would limit all. Only metrics to maximize are considered, compared with smaller
    micro-batches of the same knobs.
    """
    if direction == StudyDirection.MINIMIZE:
        return None

    def find() -> int | None:
        gains = [gain for member in group.members.values() for gain in _gains(member)]
        flat = (size for member in group.members.values() if (size := _doublings(member)[1]) is not None)
        return min((size for size in flat if fmean(_about(size, gains)) < LEAST_GAIN), default=None)

    return group.derived("plateau", find)


def _about(size: int, gains: Iterable[tuple[int, float]]) -> list[float]:
    """Return the gains of the doublings to similar micro-batches."""
    return [gain for at, gain in gains if size <= _ALIKE * at and at <= _ALIKE * size]


def _gains(lineage: Lineage) -> list[tuple[int, float]]:
    """Return the micro-batches of a lineage that were doubled to, each with its relative gain over half or less."""
    points = lineage.points()
    return [(size, value / max(smaller) - 1) for size, value in points if (smaller := _halved(points, size))]


def _doublings(lineage: Lineage) -> tuple[int, int | None]:
    """Return the largest micro-batch of a lineage before the first doubling without gain, and that doubling's size.

    Each micro-batch is compared with the best at half its size or less. The first is 0 if no doubling gained, the
    second None if all gained.
    """

    def find() -> tuple[int, int | None]:
        points, paid = sorted(lineage.points()), 0
        for size, value in points:
            smaller = _halved(points, size)
            if smaller and value < (1 + LEAST_GAIN) * max(smaller):
                return paid, size
            if smaller:
                paid = size
        return paid, None

    return lineage.derived("doublings", find)
