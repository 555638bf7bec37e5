"""Random lineages with micro-batches drawn around the middle of their interval."""

from __future__ import annotations

import random
from collections.abc import Sequence

from optuna.distributions import IntDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.samplers._base import LineageSampler, MaxMicroBatch, Proposal
from optuna_dsat.samplers._draw import Usual
from optuna_dsat.trials.lineage import (
    MICRO_BATCH,
    PLAN_ATTR,
    Feasibility,
    Lineage,
    feasibility,
    score,
    unused_micro_batches,
)
from optuna_dsat.trials.lineage_index import Lineages, best_of_all, structure_edge

__all__ = ["LineageRandomSampler"]

_ELSEWHERE_PROBABILITY = 1 / 2
"""Probability that a new lineage starts from the best lineage of the study, not of its structure."""


class LineageRandomSampler(LineageSampler):
    """Sampler that draws lineages at random and a few micro-batches in each, around the middle of its bounds.

    The micro-batch is ``low + Binomial(high - low, 1/2)``. A micro-batch that fits sets ``low = micro-batch + 1`` (and
    raises ``high`` by a quarter if the interval is then empty, within the distribution); otherwise ``high =
    micro-batch - 1``. A lineage ends after ``trials_per_random_config`` conclusive launches or when ``low > high``.

    A new lineage starts between 1 and ``high = search_range_factor * max_micro_batch``; with a memory model, in the
    upper half of this interval. The start changes once there is a measured lineage of the same structure (ZeRO stage
    and offload) or, for half of the new lineages, of any structure. With ``b`` its best micro-batch:

    - half of the new lineages start between ``b + 1`` and ``high``, as all lineages do in Determined AI's ``dsat
      random``, unless the best lineage is known to be slower or not to fit there: such launches are not informative;
    - the others start at ``b``, which compares their knobs with the best knobs at the same micro-batch, or, if larger
      micro-batches were slower, between the neighbours of ``b`` that the best lineage measured.

    With a ``planner`` a new lineage, and its first micro-batch, is drawn with the probability that it is the best.

    Intended for use with ``DeepSpeedPruner``, which ends lineages that cannot win.

    Args:
        trials_per_random_config: Largest number of conclusive launches of a lineage.
        search_range_factor: Multiplies ``max_micro_batch``.
        max_micro_batch: Largest micro-batch worth a launch for given knobs; None for the upper end of the
            micro-batch's distribution, which is always respected.
        usual: Values of the knobs in the first lineage of each structure (ZeRO stage and offload); None to draw
            these as in other lineages.
        planner: Draws new lineages and limits micro-batches by its posterior; None to draw knobs by
            ``optuna_dsat.samplers._draw``.
        micro_batch: Name of the micro-batch's parameter. It must be an integer parameter, suggested last.
        seed: Seed of the draws; None draws a seed for the study and stores it there.

    Raises:
        ValueError: If ``trials_per_random_config`` is below 1.
    """

    def __init__(
        self,
        *,
        trials_per_random_config: int = 5,
        search_range_factor: float = 1.0,
        max_micro_batch: MaxMicroBatch | None = None,
        usual: Usual | None = None,
        planner: GuidedPlanner | None = None,
        micro_batch: str = MICRO_BATCH,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            search_range_factor=search_range_factor,
            max_micro_batch=max_micro_batch,
            usual=usual,
            planner=planner,
            micro_batch=micro_batch,
            seed=seed,
        )
        if trials_per_random_config < 1:
            raise ValueError(
                f"trials_per_random_config must be at least 1, not {trials_per_random_config}:"
                " it is the number of launches of one random configuration"
            )
        self._budget = trials_per_random_config

    def _propose(
        self,
        study: Study,
        lineage: Lineage,
        distribution: IntDistribution,
        *,
        lineages: Lineages,
        history: Sequence[FrozenTrial],
        rng: random.Random,
    ) -> Proposal | None:
        if lineage.running or lineage.broken or len(lineage.conclusive) >= self._budget:
            return None
        opened = _opening_bounds(lineage) is not None
        ceiling = distribution.high if opened else self._ceiling(lineage.params, history, distribution)
        if not lineage.trials:
            edge = structure_edge(lineage, lineages)
            best = _best_measured(study, lineage, lineages)
            elsewhere = _best_elsewhere(lineages, ceiling if edge is None else min(ceiling, edge - 1), study.direction)
            if elsewhere is not None and rng.random() < _ELSEWHERE_PROBABILITY:
                best = elsewhere
            if best is None:
                return self._draw_upper_half(lineage, distribution.low, ceiling, distribution, rng)
            return _first_proposal(lineage, distribution, ceiling, best, edge, rng)
        edge = structure_edge(lineage, lineages)
        low, high = lineage.derived(
            ("bounds", ceiling, distribution, edge), lambda: bounds_left(lineage, ceiling, distribution, edge=edge)
        )
        return self._draw_upper_half(lineage, low, high, distribution, rng)

    def _draw_upper_half(
        self, lineage: Lineage, low: int, high: int, distribution: IntDistribution, rng: random.Random
    ) -> Proposal | None:
        likely = _draw_between(self._likely(lineage, low, high), high, distribution, lineage, rng)
        return likely or _draw_between(low, high, distribution, lineage, rng)


def bounds_left(
    lineage: Lineage, ceiling: int, distribution: IntDistribution, *, edge: int | None = None
) -> tuple[int, int]:
    """Return the interval (low, high) that remains after the launches of a lineage.

    Args:
        lineage: The lineage; its initial interval is its plan's, or [lower end of the distribution, ceiling].
        ceiling: Largest micro-batch worth a launch by the memory model; a soft limit, which success raises.
        distribution: Distribution of the micro-batch; its upper end is a hard limit.
        edge: Largest micro-batch still possible after failures of other lineages of the structure, None for any.
            ``high`` is not raised above it.
    """
    low, high = _opening_bounds(lineage) or (distribution.low, ceiling)
    limit = distribution.high
    for trial in lineage.conclusive:
        size = lineage.size(trial)
        if feasibility(trial) is Feasibility.FITS:
            low = max(low, size + 1)
            if low > high:
                wider = max(high + high // 4, low)
                reach = wider if edge is None else min(wider, edge)
                high = min(reach, limit)
        elif feasibility(trial) is Feasibility.TOO_LARGE:
            high = limit = min(high, limit, size - 1)
    return low, high


def _first_proposal(
    lineage: Lineage,
    distribution: IntDistribution,
    ceiling: int,
    best: tuple[Lineage, FrozenTrial],
    edge: int | None,
    rng: random.Random,
) -> Proposal | None:
    """Return the first micro-batch of a new lineage."""
    best_other, trial = best
    size = best_other.size(trial)
    largest = max(best_other.largest_fit or size, size)
    hard = distribution.high if edge is None else edge - 1
    high = min(max(largest, ceiling), hard)
    if largest > size:
        others = {result for result, _ in best_other.points()} - {size}
        below = max((result for result in others if result < size), default=distribution.low - 1)
        above = min((result for result in others if result > size), default=high + 1)
        if rng.random() < 0.5:
            return _draw_between(below + 1, max(above - 1, size), distribution, lineage, rng)
    elif size < high and rng.random() < 0.5:
        return _draw_between(size + 1, high, distribution, lineage, rng)
    return Proposal(micro_batch=min(size, distribution.high), low=distribution.low, high=max(high, size))


def _best_elsewhere(lineages: Lineages, highest: int, direction: StudyDirection) -> tuple[Lineage, FrozenTrial] | None:
    """Return the best measured trial of the study with its lineage, None if missing or above ``highest``."""
    best = None if direction == StudyDirection.MINIMIZE else best_of_all(lineages, direction)
    trial = None if best is None else best.best(direction)
    return None if best is None or trial is None or best.size(trial) > highest else (best, trial)


def _draw_between(
    low: int, high: int, distribution: IntDistribution, lineage: Lineage, rng: random.Random
) -> Proposal | None:
    """Return ``low + Binomial(high - low, 1/2)``, or the nearest value that the lineage has not used."""
    left = unused_micro_batches(low, high, distribution, used=lineage.used)
    if not left:
        return None
    drawn = low + rng.getrandbits(max(high - low, 1)).bit_count() if high > low else low
    return Proposal(micro_batch=min(left, key=lambda value: (abs(value - drawn), value)), low=low, high=high)


def _best_measured(study: Study, lineage: Lineage, lineages: Lineages) -> tuple[Lineage, FrozenTrial] | None:
    """Return the best measured trial of the same structure with its lineage, None without measurements."""
    group = lineages.structure_group(lineage.params)
    if group is None:
        return None
    sign = 1.0 if study.direction.name == "MINIMIZE" else -1.0

    def find() -> tuple[Lineage, FrozenTrial] | None:
        measured = [(o, trial) for o in group.members.values() if (trial := o.best(study.direction)) is not None]
        return min(measured, key=lambda pair: (sign * (score(pair[1]) or 0.0), pair[0].first_number), default=None)

    return group.derived(("best trial", study.direction), find)


def _opening_bounds(lineage: Lineage) -> tuple[int, int] | None:
    """Return the initial interval of a lineage, None if its first trial has no plan."""
    if not lineage.trials:
        return None
    plan = lineage.trials[0].system_attrs.get(PLAN_ATTR) or {}
    return (int(plan["low"]), int(plan["high"])) if "low" in plan else None
