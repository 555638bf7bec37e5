"""Bisection of the micro-batch inside randomly drawn lineages."""

from __future__ import annotations

import random
from collections.abc import Sequence

from optuna.distributions import IntDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from optuna_dsat.lineage import Lineage, candidates, middle, past_peak, peak_gap, search_interval
from optuna_dsat.lineage_set import Lineages
from optuna_dsat.samplers._base import LineageSampler, Proposal

__all__ = ["BinarySearchSampler"]


class BinarySearchSampler(LineageSampler):
    """Draws lineages at random and bisects the micro-batch inside each.

    A lineage starts with ``low = 1`` and ``high = search_range_factor * max_micro_batch`` (within the
    parameter's distribution). Each trial runs the middle ``(low + high) // 2``; a micro-batch that fits sets
    ``low = micro-batch + 1``, one that does not fit sets ``high = micro-batch - 1``, until ``low > high``: at
    most ``floor(log2(high)) + 1`` launches. The oldest lineage that can go on is continued first; when none
    can, a new one is drawn. Micro-batches that were vetoed or failed by accident are passed over for their
    neighbours.

    The largest micro-batch is not always the fastest. Where a rate (a metric to maximize) was measured to fall with
    a larger micro-batch, the edge is of no interest any more: the gaps beside the best micro-batch are halved
    instead, until they are narrower than a tenth of it (``optuna_dsat.lineage.peak_gap``). A duration grows with
    the micro-batch anyway, so a metric to minimize is treated so only after the edge was found.

    This is the search of Determined AI's ``dsat binary``. With ``AshaPruner`` as the study's pruner it is the
    search of ``dsat asha``: the pruner then tells which lineages go on, and in which order.

    Knobs are drawn in turn rather than by pure chance, and offloading and stages that do not fit become rare;
    see ``optuna_dsat.samplers._draw``.

    Example:
        .. code-block:: python

            study = optuna.create_study(
                direction="maximize", sampler=BinarySearchSampler(seed=42), pruner=optuna.pruners.NopPruner()
            )

    Args:
        search_range_factor: Multiplies ``max_micro_batch``.
        max_micro_batch: Largest micro-batch worth trying for given knobs; None for the high end of the
            micro-batch's distribution, which is always respected.
        micro_batch: Name of the micro-batch's parameter. It must be an integer parameter, suggested last.
        seed: Seed of the draws; None draws one for the study and stores it there.
    """

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
        del lineages, rng
        if lineage.running or lineage.broken:
            return None
        direction = study.direction
        if lineage.derived(("climbs", direction, distribution), lambda: _climbs(lineage, distribution, direction)):
            ceiling = self._ceiling(lineage.params, history, distribution)
            low, high = search_interval(lineage, ceiling, floor=distribution.low)
            left = candidates(low, high, distribution, used=lineage.used)
            if left:
                return Proposal(micro_batch=middle(left), low=low, high=high)
        gap = lineage.derived(("gap", direction, distribution), lambda: peak_gap(lineage, distribution, direction))
        return Proposal(micro_batch=middle(gap), low=gap[0], high=gap[-1]) if gap else None


def _climbs(lineage: Lineage, distribution: IntDistribution, direction: StudyDirection) -> bool:
    """Return whether a high enough ceiling would leave a micro-batch to try in the search for the edge."""
    if direction == StudyDirection.MAXIMIZE and past_peak(lineage, direction):
        return False
    low, high = search_interval(lineage, distribution.high, floor=distribution.low)
    return bool(candidates(low, high, distribution, used=lineage.used))
