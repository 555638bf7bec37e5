"""Stop lineages that cannot win, based on knowledge of DeepSpeed and the search's history."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.pruners import BasePruner
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from optuna_dsat.pruners._inflight import cannot_win, chosen_by_user, lineage_of
from optuna_dsat.trials.bisection import ended, optimistic_bound
from optuna_dsat.trials.history import best_score, by_structure, read_history, same_structure
from optuna_dsat.trials.lineage import MICRO_BATCH, Lineage, search_interval
from optuna_dsat.words import things_in_words

_NOISE = 0.03
"""Largest relative difference at which metrics of a lineage count as equal."""
_SPREAD = 0.2
"""Largest relative gain expected of other buckets and flags within a structure."""
_MIN_JUDGED = 2
"""Minimum number of judged lineages before a structure counts as hopeless."""


class DeepSpeedPruner(BasePruner):
    """Pruner that stops lineages and running trials that cannot win.

    Before a launch (nothing reported) it vetoes a trial if

    - its lineage failed at the smallest micro-batch, or at any micro-batch;
    - its lineage had ``trials_per_random_config`` launches;
    - its lineage ran out of memory, and another lineage of the structure (ZeRO stage and offload) ran a micro-batch at
      least as large as this lineage can still reach, at a metric no lower than this lineage's optimistic bound;
    - the optimistic bound of its lineage on the remaining micro-batches is worse than the best metric of the study;
    - it opens a lineage of a structure that cannot win: at least two of its lineages were judged, and the best metric
      or optimistic bound of any of them is over 20% worse than the study's best, which is more than buckets and flags
      are expected to gain.

    The last two rules replace the rule of Determined AI's ``dsat random`` that drops ZeRO 3 as soon as ZeRO 1 or 2 ran:
    a higher stage or an offload trades communication for memory, so it loses if a cheaper structure fits the same
    micro-batch, but it may win through a larger micro-batch. See ``optuna_dsat.trials.bisection`` for the
    optimistic bound; it is not applied to lineages without measurements.

    A running trial is stopped if its mean over the reported steps is worse than the mean of the study's best trial at
    the same steps by more than ``stop_margin`` and three standard errors. Enqueued trials and retries of lost trials
    are never vetoed.

    Args:
        trials_per_random_config: Largest number of conclusive launches of a lineage.
        stop_margin: Minimum relative distance from the best at which a running trial is stopped.
        micro_batch: Name of the micro-batch's parameter.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        *,
        trials_per_random_config: int = 5,
        stop_margin: float = 0.2,
        micro_batch: str = MICRO_BATCH,
    ) -> None:
        for name, value, least in (
            ("trials_per_random_config", trials_per_random_config, 1),
            ("stop_margin", stop_margin, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self._budget = trials_per_random_config
        self._stop_margin = stop_margin
        self._micro_batch = micro_batch

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether to veto a trial (nothing reported yet) or to stop a running trial."""
        if not trial.intermediate_values:
            return self.reason(study, trial) is not None
        finished = read_history(study, micro_batch=self._micro_batch, without=trial.number).finished
        return cannot_win(trial, finished, direction=study.direction, margin=self._stop_margin)

    def reason(self, study: Study, trial: FrozenTrial) -> str | None:
        """Return why a trial should not be launched, None if it should be."""
        if chosen_by_user(trial):
            return None
        lineages = read_history(study, micro_batch=self._micro_batch, without=trial.number).lineages
        lineage = lineage_of(trial, lineages, micro_batch=self._micro_batch)
        if lineage is None:
            return None
        hopeless = self.hopeless(study, lineages)
        return veto_reason(lineage, lineages, direction=study.direction, budget=self._budget, hopeless=hopeless)

    def continuable(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[str]:
        """Return the keys of the lineages that may get another launch, the oldest first."""
        hopeless, direction = self.hopeless(study, lineages), study.direction

        def may(lineage: Lineage) -> bool:
            veto = veto_reason(lineage, lineages, direction=direction, budget=self._budget, hopeless=hopeless)
            return veto is None

        return [key for key, lineage in lineages.items() if may(lineage)]

    def hopeless(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[Mapping[str, Any]]:
        """Return the structures (ZeRO stage and offload) that cannot win."""
        return hopeless_structures(lineages, direction=study.direction, budget=self._budget)


def veto_reason(
    lineage: Lineage,
    lineages: Mapping[str, Lineage],
    *,
    direction: StudyDirection,
    budget: int,
    hopeless: Sequence[Mapping[str, Any]] = (),
) -> str | None:
    """Return why a lineage gets no further launch, ``hopeless`` or after ``budget`` conclusive ones; None if it may."""
    structure = ", ".join(f"{name} {value}" for name, value in lineage.structure.items()) or "the same structure"
    if not lineage.conclusive and lineage.structure in hopeless:
        return f"{structure} cannot reach the best result so far, by what its trials measured"
    if lineage.broken:
        return "this configuration failed whatever its micro-batch"
    if lineage.dead:
        return "this configuration does not fit at the smallest micro-batch"
    if len(lineage.conclusive) >= budget:
        return f"this configuration had its {things_in_words(budget, 'launch')}"
    low, high, bound = _remaining(lineage, direction)
    if low > high:
        return None
    if lineage.smallest_too_large is not None:
        rival = _best_of_larger_fits(lineage, lineages, high, direction)
        if rival is not None and _overtaken(lineage, bound, rival, direction):
            larger = f"another configuration of {structure} ran micro-batch {high} or more"
            return f"{larger}, this one can reach {high} at most"
    best = best_score(lineages.values(), direction)
    if best is not None and lineage.points and _worse(bound, best, direction, _NOISE):
        return f"at most {bound:.4g} can be expected of this configuration, the best so far is {best:.4g}"
    return None


def hopeless_structures(
    lineages: Mapping[str, Lineage], *, direction: StudyDirection, budget: int
) -> Sequence[Mapping[str, Any]]:
    """Return the structures (ZeRO stage and offload) that cannot win.

    A structure is hopeless if at least two of its lineages were judged, and the metric and the optimistic bound of each
    lineage are worse than the best metric of the study by more than ``_SPREAD``. A lineage is judged if it ended, spent
    its budget, or was measured at two micro-batches; the bound of any other lineage is unlimited.

    Args:
        lineages: All lineages of the study.
        direction: Direction of the metric.
        budget: Largest number of conclusive launches of a lineage.
    """
    best = best_score(lineages.values(), direction)
    if best is None:
        return []
    better = max if direction == StudyDirection.MAXIMIZE else min
    result = []
    for members in by_structure(lineages).values():
        launched = [lineage for lineage in members if lineage.conclusive]
        bounds = [_lineage_bound(lineage, direction, budget) for lineage in launched]
        if len(launched) >= _MIN_JUDGED and _worse(better(bounds), best, direction, _SPREAD):
            result.append((launched[0].first_number, members[0].structure))
    return [params for _, params in sorted(result, key=lambda item: item[0])]


def _lineage_bound(lineage: Lineage, direction: StudyDirection, budget: int) -> float:
    """Return the better of a lineage's best metric and the optimistic bound of its remaining micro-batches."""
    nothing = -math.inf if direction == StudyDirection.MAXIMIZE else math.inf
    shown = lineage.best_score(direction)
    shown = nothing if shown is None else shown
    if lineage.dead or ended(lineage, direction) or len(lineage.conclusive) >= budget:
        return shown
    if len({size for size, _ in lineage.points}) < 2:
        return -nothing
    _, _, left = _remaining(lineage, direction)
    return left if _worse(shown, left, direction, 0.0) else shown


def _remaining(lineage: Lineage, direction: StudyDirection) -> tuple[int, int, float]:
    """Return the remaining micro-batches (low, high) of a lineage, and the optimistic bound on their metric."""
    low, high = _remaining_interval(lineage)
    return low, high, optimistic_bound(lineage.points, low, high, direction=direction, margin=_NOISE)


def _remaining_interval(lineage: Lineage) -> tuple[int, int]:
    distribution = lineage.distribution
    if distribution is None:
        return 1, 0
    low, high = search_interval(lineage, lineage.ceiling or distribution.high, floor=distribution.low)
    if low > high and lineage.smallest_too_large is None:
        high = min(low, distribution.high)  # the ceiling was too low: the next micro-batch may fit
    return low, high


def _best_of_larger_fits(
    lineage: Lineage, lineages: Mapping[str, Lineage], high: int, direction: StudyDirection
) -> float | None:
    """Return the best metric of other lineages of the structure that ran micro-batches from ``high`` up, or None."""
    others = same_structure(lineages, lineage.params)
    return best_score((o for o in others if o.key != lineage.key and (o.largest_fit or 0) >= high), direction)


def _overtaken(lineage: Lineage, bound: float, rival: float, direction: StudyDirection) -> bool:
    return not lineage.points or _worse(bound, rival, direction, 0.0)


def _worse(value: float, than: float, direction: StudyDirection, margin: float) -> bool:
    """Return whether a metric is worse than another by more than the relative ``margin``."""
    if math.isinf(value) or math.isinf(than):
        return value < than if direction == StudyDirection.MAXIMIZE else value > than
    allowed = margin * abs(than)
    return value < than - allowed if direction == StudyDirection.MAXIMIZE else value > than + allowed
