"""Stops lineages that cannot win, by knowledge of DeepSpeed and of the search so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.pruners import BasePruner
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from optuna_dsat.lineage import MICRO_BATCH, Lineage, group, lineage_key, search_interval, structure
from optuna_dsat.pruners._common import chosen_by_user, lineage_of
from optuna_dsat.pruners._inflight import cannot_win
from optuna_dsat.pruners._knowledge import potential

__all__ = ["DeepSpeedPruner"]

_NOISE = 0.03
"""Metrics of one lineage closer than this, relative to each other, are taken as equal."""
_SPREAD = 0.2
"""How much other buckets and flags may add, at most, to what lineages of the same structure showed."""
_WITNESSES = 2
"""Lineages of a structure that must be judged before all of it is called hopeless."""


class DeepSpeedPruner(BasePruner):
    """Stops lineages and jobs that cannot win.

    Before a launch (nothing reported) it vetoes a trial when

    - its lineage failed at the smallest micro-batch, or whatever the micro-batch;
    - its lineage had ``trials_per_random_config`` launches;
    - its lineage ran out of memory, and another one of the same structure (ZeRO stage and offload) ran a
    micro-batch as
      large as this one can still reach, no slower than this one can plausibly become;
    - its lineage cannot catch up with the best metric of the study on the micro-batches that it has left;
    - it opens a lineage of a structure that cannot win: at least two of its lineages were judged, and the
    best that
      any of them showed or promises is over 20 % worse than the study's best, which is more than buckets and
      flags are expected to make up.

    The last two replace the rule of Determined AI's ``dsat random`` that drops ZeRO 3 as soon as ZeRO 1 or 2
    ran: a higher stage or an offload pays communication for memory, so it loses where a cheaper one holds the
    same micro-batch, but it may win through a larger one. What a lineage can plausibly become is an
    optimistic extrapolation of what it measured, see ``optuna_dsat.pruners._knowledge``; a lineage measured
    once or not at all is not judged by it.

    In flight it stops a job whose mean over the reported steps is worse than that of the study's best trial
    at the same steps by more than ``stop_margin`` and three standard errors. Enqueued trials and copies of
    lost ones are never vetoed.

    Args:
        trials_per_random_config: Most launches of one lineage that may teach something.
        warmup_reports: Reports a job makes before it may be stopped, at least 1.
        stop_margin: Least distance from the best, relative to it, that stops a job in flight.
        micro_batch: Name of the micro-batch's parameter.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        *,
        trials_per_random_config: int = 5,
        warmup_reports: int = 1,
        stop_margin: float = 0.2,
        micro_batch: str = MICRO_BATCH,
    ) -> None:
        for name, value, least in (
            ("trials_per_random_config", trials_per_random_config, 1),
            ("warmup_reports", warmup_reports, 1),
            ("stop_margin", stop_margin, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self._budget = trials_per_random_config
        self._warmup = warmup_reports
        self._stop_margin = stop_margin
        self._micro_batch = micro_batch

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether to veto a trial (nothing reported yet) or to stop it in flight."""
        if not trial.intermediate_values:
            return self.reason(study, trial) is not None
        if len(trial.intermediate_values) < self._warmup:
            return False
        others = study.get_trials(deepcopy=False)
        return cannot_win(trial, others, direction=study.direction, margin=self._stop_margin)

    def reason(self, study: Study, trial: FrozenTrial) -> str | None:
        """Return why a trial should not be launched, None if it should."""
        if chosen_by_user(trial):
            return None
        others = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        lineages = group(others, micro_batch=self._micro_batch)
        lineage = lineage_of(trial, lineages, micro_batch=self._micro_batch)
        if lineage is None:
            return None
        return self._why(lineage, lineages, self.hopeless(study, lineages), study.direction)

    def held_back(self, study: Study, lineages: Mapping[str, Lineage]) -> frozenset[str]:
        """Return the keys of the lineages that cannot win any more."""
        return frozenset(lineages) - frozenset(self.continuable(study, lineages))

    def continuable(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[str]:
        """Return the keys of the lineages that may get another launch, the oldest first."""
        kinds = self.hopeless(study, lineages)
        return [k for k, o in lineages.items() if self._why(o, lineages, kinds, study.direction) is None]

    def hopeless(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[Mapping[str, Any]]:
        """Return the structures (ZeRO stage and offload) of which no lineage can win."""
        return hopeless_structures(lineages.values(), direction=study.direction, budget=self._budget)

    def _why(
        self,
        lineage: Lineage,
        lineages: Mapping[str, Lineage],
        hopeless: Sequence[Mapping[str, Any]],
        direction: StudyDirection,
    ) -> str | None:
        if not lineage.answers and structure(lineage.params) in hopeless:
            return f"{_describe(lineage)} cannot reach the best result so far, by what its trials measured"
        return why_held_back(lineage, lineages, direction=direction, budget=self._budget)


def why_held_back(
    lineage: Lineage, lineages: Mapping[str, Lineage], *, direction: StudyDirection, budget: int
) -> str | None:
    """Return why a lineage should get no further launch, None if it may.

    Args:
        lineage: The lineage.
        lineages: All lineages of the study.
        direction: What is better.
        budget: Most launches of one lineage that may teach something.
    """
    if lineage.broken:
        return "this configuration failed whatever its micro-batch"
    if lineage.dead:
        return "this configuration does not fit at the smallest micro-batch"
    if len(lineage.answers) >= budget:
        return f"this configuration had its {budget} launches"
    low, high = _reach(lineage)
    promise = potential(lineage.points(), low, high, direction=direction, margin=_NOISE)
    if lineage.smallest_too_large is not None and low <= high:
        rival = _larger_and_no_slower(lineage, lineages.values(), high, promise, direction)
        if rival is not None:
            return (
                f"another configuration of {_describe(lineage)} ran micro-batch {rival.largest_fit},"
                f" this one can reach {high} at most"
            )
    best = _best_score(lineages.values(), direction)
    measured_twice = len({size for size, _ in lineage.points()}) > 1
    if best is not None and low <= high and measured_twice and _worse(promise, best, direction, _NOISE):
        return f"at most {promise:.4g} can be expected of this configuration, the best so far is {best:.4g}"
    return None


def hopeless_structures(lineages: Iterable[Lineage], *, direction: StudyDirection, budget: int) -> list[dict[str, Any]]:
    """Return the structures of which enough lineages were judged, and none can come near the best.

    A lineage is judged when it ended, spent its budget, or was measured at two micro-batches. While one of a
    structure is not, the structure is not hopeless.

    Args:
        lineages: All lineages of the study.
        direction: What is better.
        budget: Most launches of one lineage that may teach something.
    """
    known = [lineage for lineage in lineages if lineage.answers]
    best = _best_score(known, direction)
    if best is None:
        return []
    promises: dict[str, list[float]] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for lineage in known:
        kind = structure(lineage.params)
        kinds.setdefault(lineage_key(kind), kind)
        promises.setdefault(lineage_key(kind), []).append(_promise(lineage, direction, budget))
    return [
        kinds[key]
        for key, found in promises.items()
        if len(found) >= _WITNESSES and all(_worse(promise, best, direction, _SPREAD) for promise in found)
    ]


def _promise(lineage: Lineage, direction: StudyDirection, budget: int) -> float:
    """Return the best metric that a lineage showed or may still show."""
    nothing = -math.inf if direction == StudyDirection.MAXIMIZE else math.inf
    shown = lineage.best_score(direction)
    shown = nothing if shown is None else shown
    if lineage.dead or lineage.ended(direction) or len(lineage.answers) >= budget:
        return shown
    if len({size for size, _ in lineage.points()}) < 2:
        return -nothing
    low, high = _reach(lineage)
    left = potential(lineage.points(), low, high, direction=direction, margin=_NOISE)
    return left if _worse(shown, left, direction, 0.0) else shown


def _reach(lineage: Lineage) -> tuple[int, int]:
    distribution = lineage.distribution
    if distribution is None:
        return 1, 0
    return search_interval(lineage, distribution.high, floor=distribution.low)


def _larger_and_no_slower(
    lineage: Lineage, lineages: Iterable[Lineage], high: int, promise: float, direction: StudyDirection
) -> Lineage | None:
    """Return a lineage of the same structure that ran ``high`` or more and that this one cannot beat."""
    kind = structure(lineage.params)
    for other in lineages:
        if other.key == lineage.key or structure(other.params) != kind or (other.largest_fit or 0) < high:
            continue
        theirs = other.best_score(direction)
        if theirs is not None and (not lineage.points() or _worse(promise, theirs, direction, 0.0)):
            return other
    return None


def _best_score(lineages: Iterable[Lineage], direction: StudyDirection) -> float | None:
    scores = [s for s in (lineage.best_score(direction) for lineage in lineages) if s is not None]
    if not scores:
        return None
    return max(scores) if direction == StudyDirection.MAXIMIZE else min(scores)


def _worse(value: float, than: float, direction: StudyDirection, margin: float) -> bool:
    """Return whether a metric is worse than another by more than ``margin`` times its size."""
    if math.isinf(value) or math.isinf(than):
        return value < than if direction == StudyDirection.MAXIMIZE else value > than
    allowed = margin * abs(than)
    return value < than - allowed if direction == StudyDirection.MAXIMIZE else value > than + allowed


def _describe(lineage: Lineage) -> str:
    kind = structure(lineage.params)
    return ", ".join(f"{name} {value}" for name, value in kind.items()) or "the same structure"
