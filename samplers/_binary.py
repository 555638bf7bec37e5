"""Bisection of the micro-batch inside randomly drawn lineages."""

from __future__ import annotations

import random
from collections.abc import Mapping

from optuna.distributions import IntDistribution
from optuna.study import Study, StudyDirection

from optuna_dsat.samplers._base import LineageSampler, Proposal
from optuna_dsat.trials.bisection import edge_interval, refine
from optuna_dsat.trials.history import StudyHistory, best_lineage, best_score, same_structure, structure_edge
from optuna_dsat.trials.lineage import Lineage, middle, past_peak, search_interval, unused_micro_batches


class BinarySearchSampler(LineageSampler):
    """Sampler that draws lineages at random and bisects the micro-batch inside each.

    A lineage starts with ``low = 1`` and ``high`` the upper end of the parameter's distribution, or
    ``search_range_factor`` times the largest micro-batch that the planner expects to fit. A micro-batch that fits sets
    ``low = micro-batch + 1``, otherwise ``high = micro-batch - 1``. The oldest unfinished
    lineage is continued first; if all are finished, a new lineage is drawn. Micro-batches that were vetoed or failed
    for unrelated reasons are replaced by their neighbours.

    The interval is divided

    - in the middle, by default;
    - with a ``planner``, in the middle of its upper half, until a micro-batch of that half has fitted or two were too
      large: models are rarely wrong by a factor of two;
    - if a lineage of the same structure (ZeRO stage and offload) was measured, at the micro-batch of the best such
      lineage, so that both are compared at the same size, and an eighth lower if this is too large. Micro-batches that
      were slower for the best lineage, or too large for lineages that need no more memory, are excluded. The first
      lineage of a structure starts with the micro-batch of the study's best lineage.

    A bisection ends when ``low > high``. For a rate (a metric to maximize) it also ends when the interval is shorter
    than a twentieth of the micro-batch, or when the lineage cannot become the best of the study, because a rate grows
    at most in proportion to the micro-batch (``optuna_dsat.trials.bisection``).

    The largest micro-batch is not always the fastest. If a rate was measured to decrease with a larger micro-batch, the
    gaps next to the best micro-batch are bisected instead of the edge, until they are narrower than a tenth of it
    (``optuna_dsat.trials.lineage.peak_gap``). Durations always grow with the micro-batch, so for a metric to minimize
    this happens only after the edge was found.

    This is the search of Determined AI's ``dsat binary``, which always bisects in the middle and down to the last
    sample. With ``AshaPruner`` as the study's pruner it is the search of ``dsat asha``: the pruner then decides which
    lineages continue, and in which order.

    With a ``planner`` a new lineage, and its first micro-batch, is drawn with the probability that it is the best.
    Without, knobs are drawn at random among lineages that were not opened before.

    Example:
        .. code-block:: python

            study = optuna.create_study(
                direction="maximize", sampler=BinarySearchSampler(seed=42), pruner=optuna.pruners.NopPruner()
            )

    Args:
        search_range_factor: Multiplies the largest micro-batch that the planner expects to fit.
        planner: Draws new lineages and limits micro-batches by its posterior; None to draw knobs at random.
        micro_batch: Name of the micro-batch's parameter. It must be an integer parameter, suggested last; the first
            trial of a study raises ``ValueError`` if the parameter is missing or a float.
        seed: Seed of the draws; None draws a seed for the study and stores it there.
    """

    def _propose(
        self,
        study: Study,
        lineage: Lineage,
        distribution: IntDistribution,
        *,
        history: StudyHistory,
        rng: random.Random,
    ) -> Proposal | None:
        del rng
        if lineage.running or lineage.broken:
            return None
        direction, lineages = study.direction, history.lineages
        best = best_score(lineages.values(), direction)
        if _has_edge_left(lineage, distribution, direction):
            best_other = _best_other(lineage, lineages, direction)
            limits = (
                structure_edge(lineage, lineages),
                None if best_other is None else _first_slower(best_other, direction),
            )
            ceiling = self._ceiling(lineage.params, history.trials, distribution)
            ceiling = min([ceiling, *(limit for limit in limits if limit is not None)])
            bounds = edge_interval(lineage, ceiling, distribution, direction=direction, best=best)
            if bounds is not None:
                model = best_other or _best_elsewhere(lineage, lineages, direction)
                size = self._pick(lineage, model, *bounds, distribution, direction)
                return Proposal(micro_batch=size, low=bounds[0], high=bounds[1])
        gap = refine(lineage, distribution, direction=direction, best=best)
        return Proposal(micro_batch=middle(gap), low=gap[0], high=gap[-1]) if gap else None

    def _pick(
        self,
        lineage: Lineage,
        model: Lineage | None,
        low: int,
        high: int,
        distribution: IntDistribution,
        direction: StudyDirection,
    ) -> int:
        """Return where to divide the interval: first at the best micro-batch of another lineage, then in the middle."""
        left = unused_micro_batches(low, high, distribution, used=lineage.used)
        best = None if model is None else model.best(direction)
        if model is not None and best is not None and lineage.largest_fit is None:
            target = model.size(best)
            if target > high:
                target = high - high // 8
            return min(left, key=lambda size: (abs(size - target), size))
        likely = unused_micro_batches(self._likely(lineage, low, high), high, distribution, used=lineage.used)
        return middle(likely or left)


def _has_edge_left(lineage: Lineage, distribution: IntDistribution, direction: StudyDirection) -> bool:
    """Return whether the search for the edge has micro-batches left, regardless of the ceiling."""
    if direction == StudyDirection.MAXIMIZE and past_peak(lineage, direction):
        return False
    low, high = search_interval(lineage, distribution.high, floor=distribution.low)
    return bool(unused_micro_batches(low, high, distribution, used=lineage.used))


def _best_other(lineage: Lineage, lineages: Mapping[str, Lineage], direction: StudyDirection) -> Lineage | None:
    """Return the best lineage of the same structure, the earliest of ties; None if no other was measured."""
    if direction == StudyDirection.MINIMIZE:
        return None
    best = best_lineage(same_structure(lineages, lineage.params), direction)
    return None if best is None or best.key == lineage.key else best


def _best_elsewhere(lineage: Lineage, lineages: Mapping[str, Lineage], direction: StudyDirection) -> Lineage | None:
    """Return the best lineage of the study if the lineage's structure was not measured, else None."""
    measured = best_lineage(same_structure(lineages, lineage.params), direction)
    if direction == StudyDirection.MINIMIZE or measured is not None:
        return None
    return best_lineage(lineages.values(), direction)


def _first_slower(lineage: Lineage, direction: StudyDirection) -> int | None:
    """Return the first measured micro-batch above the peak, None if no larger micro-batch was slower."""
    best = lineage.best(direction)
    if best is None or not past_peak(lineage, direction):
        return None
    peak = lineage.size(best)
    return min((size for size, _ in lineage.points if size > peak), default=None)
