"""Random lineages with micro-batches drawn around the middle of their interval."""

from __future__ import annotations

import random

from optuna.distributions import IntDistribution
from optuna.study import Study

from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.samplers._base import LineageSampler, Proposal
from optuna_dsat.trials.bisection import EDGE_WIDTH
from optuna_dsat.trials.history import StudyHistory, structure_edge
from optuna_dsat.trials.lineage import MICRO_BATCH, PLAN_ATTR, Feasibility, Lineage, feasibility, unused_micro_batches


class LineageRandomSampler(LineageSampler):
    """Sampler that draws lineages at random and a few micro-batches in each, around the middle of its bounds.

    The micro-batch is ``low + Binomial(high - low, 1/2)``. A micro-batch that fits sets ``low = micro-batch + 1`` (and
    raises ``high`` by a quarter if the interval is then empty, within the distribution); otherwise ``high =
    micro-batch - 1``. A lineage ends after ``trials_per_random_config`` conclusive launches or when ``low > high``.

    With a ``planner`` a new lineage, and its first micro-batch, is drawn with the probability that it is the best.
    Without, knobs are drawn at random among lineages that were not opened before.

    Intended for use with ``DeepSpeedPruner``, which ends lineages that cannot win.

    Args:
        trials_per_random_config: Largest number of conclusive launches of a lineage.
        search_range_factor: Multiplies the largest micro-batch that the planner expects to fit.
        planner: Draws new lineages and limits micro-batches by its posterior; None to draw knobs at random.
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
        planner: GuidedPlanner | None = None,
        micro_batch: str = MICRO_BATCH,
        seed: int | None = None,
    ) -> None:
        super().__init__(search_range_factor=search_range_factor, planner=planner, micro_batch=micro_batch, seed=seed)
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
        history: StudyHistory,
        rng: random.Random,
    ) -> Proposal | None:
        del study
        if lineage.running or lineage.broken or len(lineage.conclusive) >= self._budget:
            return None
        low, high = distribution.low, distribution.high
        if _opening_bounds(lineage) is None:
            high = self._ceiling(lineage.params, history.trials, distribution)
        if lineage.trials:
            low, high = bounds_left(lineage, high, distribution, edge=structure_edge(lineage, history.lineages))
            if high == distribution.high and high - low + 1 <= EDGE_WIDTH * (lineage.largest_fit or 0):
                return None  # the data end it, not memory
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


def _draw_between(
    low: int, high: int, distribution: IntDistribution, lineage: Lineage, rng: random.Random
) -> Proposal | None:
    """Return ``low + Binomial(high - low, 1/2)``, or the nearest value that the lineage has not used."""
    left = unused_micro_batches(low, high, distribution, used=lineage.used)
    if not left:
        return None
    drawn = low + rng.getrandbits(max(high - low, 1)).bit_count() if high > low else low
    return Proposal(micro_batch=min(left, key=lambda value: (abs(value - drawn), value)), low=low, high=high)


def _opening_bounds(lineage: Lineage) -> tuple[int, int] | None:
    """Return the initial interval of a lineage, None if its first trial has no plan."""
    if not lineage.trials:
        return None
    plan = lineage.trials[0].system_attrs.get(PLAN_ATTR) or {}
    return (int(plan["low"]), int(plan["high"])) if "low" in plan else None
