"""Stops lineages that cannot win, by knowledge of DeepSpeed and of the search so far."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from optuna.pruners import BasePruner
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from optuna_dsat.pruners._common import chosen_by_user, lineage_of
from optuna_dsat.pruners._inflight import cannot_win, reports_of
from optuna_dsat.trials.bisection import ended
from optuna_dsat.trials.extrapolation import optimistic_bound
from optuna_dsat.trials.lineage import MICRO_BATCH, Lineage, search_interval
from optuna_dsat.trials.lineage_cache import read_history
from optuna_dsat.trials.lineage_index import Lineages, StructureGroup, best_score

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
    - its lineage ran out of memory, and another one of the same structure (ZeRO stage and offload) ran a micro-batch
      as large as this one can still reach, no slower than this one can plausibly become;
    - its lineage cannot catch up with the best metric of the study on the micro-batches that it has left;
    - it opens a lineage of a structure that cannot win: at least two of its lineages were judged, and the best that
      any of them showed or promises is over 20 % worse than the study's best, which is more than buckets and flags
      are expected to make up.

    The last two replace the rule of Determined AI's ``dsat random`` that drops ZeRO 3 as soon as ZeRO 1 or 2
    ran: a higher stage or an offload pays communication for memory, so it loses where a cheaper one holds the
    same micro-batch, but it may win through a larger one. What a lineage can plausibly become is an
    optimistic extrapolation of what it measured, see ``optuna_dsat.trials.extrapolation``; a lineage not measured yet
    is not judged by it.

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
        reports = reports_of(read_history(study, micro_batch=self._micro_batch, without=trial.number))
        return cannot_win(trial, reports, direction=study.direction, margin=self._stop_margin)

    def reason(self, study: Study, trial: FrozenTrial) -> str | None:
        """Return why a trial should not be launched, None if it should."""
        if chosen_by_user(trial):
            return None
        lineages = read_history(study, micro_batch=self._micro_batch, without=trial.number).lineages
        lineage = lineage_of(trial, lineages, micro_batch=self._micro_batch)
        if lineage is None:
            return None
        verdict = self._judge(lineage, lineages, study.direction)
        return None if verdict is None else self._explain(verdict, lineage, lineages, study.direction)

    def held_back(self, study: Study, lineages: Mapping[str, Lineage]) -> frozenset[str]:
        """Return the keys of the lineages that cannot win any more."""
        return frozenset(lineages) - frozenset(self.continuable(study, lineages))

    def continuable(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[str]:
        """Return the keys of the lineages that may get another launch, the oldest first."""
        known, direction = Lineages.of(lineages), study.direction

        def find() -> list[str]:
            hopeless = hopeless_structures(known, direction=direction, budget=self._budget)
            best = best_score(known, direction)
            going_on: list[tuple[int, str]] = []
            for kind in known.structures.values():
                is_hopeless = kind.params in hopeless
                going_on += kind.derived(
                    ("going on", self._budget, direction, best, is_hopeless),
                    partial(self._going_on, kind, known, direction),
                )
            return [key for _, key in sorted(going_on)]

        return known.derived(("continuable", self._budget, direction), find)

    def _going_on(self, kind: StructureGroup, lineages: Lineages, direction: StudyDirection) -> list[tuple[int, str]]:
        """Return the lineages of a kind that may get another launch: number of the first trial, and key."""
        return [(o.first_number, o.key) for o in kind.members.values() if self._judge(o, lineages, direction) is None]

    def hopeless(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[Mapping[str, Any]]:
        """Return the structures (ZeRO stage and offload) of which no lineage can win."""
        return hopeless_structures(Lineages.of(lineages), direction=study.direction, budget=self._budget)

    def _judge(self, lineage: Lineage, lineages: Lineages, direction: StudyDirection) -> Verdict | None:
        if not lineage.conclusive:
            hopeless = hopeless_structures(lineages, direction=direction, budget=self._budget)
            if lineage.structure in hopeless:
                return Verdict.HOPELESS
        return judge(lineage, lineages, direction=direction, budget=self._budget)

    def _explain(self, verdict: Verdict, lineage: Lineage, lineages: Lineages, direction: StudyDirection) -> str:
        """Return a verdict in words; of the configurations that overtook this one, the earliest is named."""
        _, high, promise = _outlook(lineage, direction)
        kind = lineages.structure_group(lineage.params)
        overtakers = [
            other
            for other in (kind.members.values() if kind is not None else ())
            if verdict is Verdict.OVERTAKEN
            and other.key != lineage.key
            and (other.largest_fit or 0) >= high
            and (theirs := other.best_score(direction)) is not None
            and _overtaken(lineage, promise, theirs, direction)
        ]
        earliest = min(overtakers, key=lambda other: other.first_number, default=lineage)
        return verdict.value.format(
            launches=self._budget,
            structure=", ".join(f"{name} {value}" for name, value in lineage.structure.items()) or "the same structure",
            larger=earliest.largest_fit,
            high=high,
            promise=promise,
            best=best_score(lineages, direction) or 0.0,
        )


class Verdict(StrEnum):
    """Why a lineage gets no further launch."""

    BROKEN = "this configuration failed whatever its micro-batch"
    DEAD = "this configuration does not fit at the smallest micro-batch"
    SPENT = "this configuration had its {launches} launches"
    OVERTAKEN = "another configuration of {structure} ran micro-batch {larger}, this one can reach {high} at most"
    BEHIND = "at most {promise:.4g} can be expected of this configuration, the best so far is {best:.4g}"
    HOPELESS = "{structure} cannot reach the best result so far, by what its trials measured"


def judge(lineage: Lineage, lineages: Lineages, *, direction: StudyDirection, budget: int) -> Verdict | None:
    """Return why a lineage should get no further launch, None if it may.

    Args:
        lineage: The lineage.
        lineages: All lineages of the study.
        direction: What is better.
        budget: Most launches of one lineage that may teach something.
    """
    if lineage.broken:
        return Verdict.BROKEN
    if lineage.dead:
        return Verdict.DEAD
    if len(lineage.conclusive) >= budget:
        return Verdict.SPENT
    low, high, promise = _outlook(lineage, direction)
    if low > high:
        return None
    if lineage.smallest_too_large is not None:
        rival = _best_of_larger(lineage, lineages, high, direction)
        if rival is not None and _overtaken(lineage, promise, rival, direction):
            return Verdict.OVERTAKEN
    best = lineages.derived(("best score", direction), lambda: best_score(lineages, direction))
    if best is not None and lineage.points() and _worse(promise, best, direction, _NOISE):
        return Verdict.BEHIND
    return None


def hopeless_structures(lineages: Lineages, *, direction: StudyDirection, budget: int) -> Sequence[Mapping[str, Any]]:
    """Return the structures (ZeRO stage and offload) of which no lineage can win.

    That is: at least two of its lineages were judged, and what any lineage showed or promises is worse than the
    best metric of the study by more than ``_SPREAD``. A lineage is judged when it ended, spent its budget, or was
    measured at two micro-batches. While one of a structure is not, the structure is not hopeless.

    Args:
        lineages: All lineages of the study.
        direction: What is better.
        budget: Most launches of one lineage that may teach something.
    """

    def find() -> list[Mapping[str, Any]]:
        best = best_score(lineages, direction)
        if best is None:
            return []
        found = ((_outlook_of_kind(kind, direction, budget), kind) for kind in lineages.structures.values())
        bad = [
            (outlook.first, kind.params)
            for outlook, kind in found
            if outlook.lineages >= _WITNESSES and _worse(outlook.promise, best, direction, _SPREAD)
        ]
        return [params for _, params in sorted(bad, key=lambda one: one[0])]

    return lineages.derived(("hopeless", direction, budget), find)


@dataclass(frozen=True, kw_only=True)
class _KindOutlook:
    """What the lineages of a structure that taught something promise."""

    lineages: int
    promise: float
    """The best metric that any of them showed or may still show."""
    first: int
    """Number of the first trial of the earliest of them."""


def _outlook_of_kind(kind: StructureGroup, direction: StudyDirection, budget: int) -> _KindOutlook:
    better = max if direction == StudyDirection.MAXIMIZE else min

    def find() -> _KindOutlook:
        known = [lineage for lineage in kind.members.values() if lineage.conclusive]
        return _KindOutlook(
            lineages=len(known),
            promise=better((_promise(lineage, direction, budget) for lineage in known), default=math.nan),
            first=min((lineage.first_number for lineage in known), default=-1),
        )

    return kind.derived(("outlook", direction, budget), find)


def _promise(lineage: Lineage, direction: StudyDirection, budget: int) -> float:
    """Return the best metric that a lineage showed or may still show."""

    def find() -> float:
        nothing = -math.inf if direction == StudyDirection.MAXIMIZE else math.inf
        shown = lineage.best_score(direction)
        shown = nothing if shown is None else shown
        if lineage.dead or ended(lineage, direction) or len(lineage.conclusive) >= budget:
            return shown
        if len({size for size, _ in lineage.points()}) < 2:
            return -nothing
        _, _, left = _outlook(lineage, direction)
        return left if _worse(shown, left, direction, 0.0) else shown

    return lineage.derived(("promise", direction, budget), find)


def _outlook(lineage: Lineage, direction: StudyDirection) -> tuple[int, int, float]:
    """Return the micro-batches (low, high) that a lineage has left, and the best metric it can show there."""

    def find() -> tuple[int, int, float]:
        low, high = _reach(lineage)
        return low, high, optimistic_bound(lineage.points(), low, high, direction=direction, margin=_NOISE)

    return lineage.derived(("outlook", direction), find)


def _reach(lineage: Lineage) -> tuple[int, int]:
    distribution = lineage.distribution
    if distribution is None:
        return 1, 0
    low, high = search_interval(lineage, lineage.ceiling or distribution.high, floor=distribution.low)
    if low > high and lineage.smallest_too_large is None:
        high = min(low, distribution.high)  # the ceiling was too low: nothing speaks against the next one
    return low, high


def _best_of_larger(lineage: Lineage, lineages: Lineages, high: int, direction: StudyDirection) -> float | None:
    """Return the best metric of the other lineages of the same structure that ran ``high`` or more."""
    kind = lineages.structure_group(lineage.params)
    if kind is None:
        return None
    sizes, best_two = kind.derived(("larger", direction), lambda: _best_by_size(kind, direction))
    above = bisect_right(sizes, -high)  # the first ``above`` lineages ran high or more
    return next((found for found, key in best_two[above] if key != lineage.key), None)


def _best_by_size(kind: StructureGroup, direction: StudyDirection) -> tuple[list[int], list[list[tuple[float, str]]]]:
    """Return the largest micro-batches of a kind's lineages, negative and ascending, with the best two up to each.

    Item n of the second list holds the best two (metric, key) of the n lineages with the largest micro-batches.
    """
    maximize = direction == StudyDirection.MAXIMIZE
    shown = [
        (-(o.largest_fit or 0), best, o.key)
        for o in kind.members.values()
        if (best := o.best_score(direction)) is not None
    ]
    shown.sort()
    best_two: list[list[tuple[float, str]]] = [[]]
    for _, best, key in shown:
        best_two.append(sorted([*best_two[-1], (best, key)], reverse=maximize)[:2])
    return [size for size, _, _ in shown], best_two


def _overtaken(lineage: Lineage, promise: float, rival: float, direction: StudyDirection) -> bool:
    return not lineage.points() or _worse(promise, rival, direction, 0.0)


def _worse(value: float, than: float, direction: StudyDirection, margin: float) -> bool:
    """Return whether a metric is worse than another by more than ``margin`` times its size."""
    if math.isinf(value) or math.isinf(than):
        return value < than if direction == StudyDirection.MAXIMIZE else value > than
    allowed = margin * abs(than)
    return value < than - allowed if direction == StudyDirection.MAXIMIZE else value > than + allowed
