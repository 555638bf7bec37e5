"""Trial history as lineages: pure functions over frozen trials.

A lineage is the set of trials that agree in every knob but the micro-batch. Memory use grows with the
micro-batch, so what one trial of a lineage shows (it fits, it is too large) bounds what its other trials may
try. Samplers and pruners decide on lineages alone, so any worker can continue any study.

Trials are read through the user attributes ``outcome`` (value of ``Outcome``) and ``vetoed`` (why the trial
was told without a launch). Trials of a study that sets neither are read by their state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.outcome import Outcome

__all__ = [
    "MICRO_BATCH",
    "OFFLOAD_OPTIMIZER",
    "OFFLOAD_PARAM",
    "OUTCOME_ATTR",
    "PEAK_MARGIN",
    "PEAK_WIDTH",
    "PLAN_ATTR",
    "RETRY_ATTR",
    "STRUCTURE",
    "VETOED_ATTR",
    "ZERO_STAGE",
    "Evidence",
    "Lineage",
    "LineageGate",
    "MicroBatchSet",
    "agrees",
    "candidates",
    "canonical",
    "evidence",
    "group",
    "lineage_key",
    "micro_batches_of",
    "middle",
    "past_peak",
    "peak_gap",
    "score",
    "search_interval",
    "structure",
    "unreachable",
    "visible_params",
]

T = TypeVar("T")

MICRO_BATCH = "train_micro_batch_size_per_gpu"
"""Optuna parameter (and DeepSpeed key) of the micro-batch, in samples per GPU."""
ZERO_STAGE = "zero_stage"
OFFLOAD_OPTIMIZER = "offload_optimizer"
OFFLOAD_PARAM = "offload_param"
STRUCTURE = (ZERO_STAGE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)
"""The knobs that decide where model states live, and with it what fits and what is communicated."""

OUTCOME_ATTR = "outcome"
"""User attribute: value of ``Outcome``, set once a launch is over."""
VETOED_ATTR = "vetoed"
"""User attribute: why the trial was told without a launch."""
PLAN_ATTR = "dsat:plan"
"""System attribute: what a sampler means to run, so that a running trial shows its lineage early."""

RETRY_ATTR = "failed_trial"
"""System attribute that Optuna's ``RetryHeartbeatStaleTrialCallback`` sets on the copy of a lost trial."""

PEAK_MARGIN = 0.03
"""Relative difference between two metrics of a lineage that is taken as real, not as noise."""
PEAK_WIDTH = 0.1
"""A peak is known well enough within this part of its micro-batch: there the metric is flat."""

_FIXED_ATTR = "fixed_params"  # where Optuna 5 keeps the parameters of ``Study.enqueue_trial``


class Evidence(StrEnum):
    """What one trial says of its micro-batch."""

    FITS = "fits"
    """At least one full step was run."""
    TOO_LARGE = "too_large"
    """The device or the host ran out of memory, or the script out of data."""
    BROKEN = "broken"
    """The configuration fails whatever the micro-batch: refused by DeepSpeed, or the script raised."""
    NONE = "none"
    """Nothing: not over yet, never launched, or failed for a reason that is not the configuration's."""


def evidence(trial: FrozenTrial) -> Evidence:
    """Return what a trial says of its micro-batch.

    A job stopped in flight after a full step fits; out of memory counts even after steps that were reported.
    In a study that sets no ``outcome``, a pruned trial without a report is taken as too large, which is how
    studies mark what does not fit.
    """
    if not trial.state.is_finished() or trial.user_attrs.get(VETOED_ATTR):
        return Evidence.NONE
    outcome = trial.user_attrs.get(OUTCOME_ATTR)
    if trial.state == TrialState.COMPLETE:
        return Evidence.FITS
    if trial.state == TrialState.FAIL:
        broken = outcome in (Outcome.INVALID_CONFIG, Outcome.SCRIPT_ERROR)
        return Evidence.BROKEN if broken else Evidence.NONE
    if outcome in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY, Outcome.OUT_OF_DATA):
        return Evidence.TOO_LARGE
    if trial.intermediate_values:
        return Evidence.FITS
    return Evidence.TOO_LARGE if outcome is None else Evidence.NONE


def score(trial: FrozenTrial) -> float | None:
    """Return the metric a trial showed: its value, or the last report of a job stopped in flight."""
    found: float | None = None
    if trial.state == TrialState.COMPLETE and trial.values is not None and len(trial.values) == 1:
        found = trial.values[0]
    elif trial.state == TrialState.PRUNED and evidence(trial) is Evidence.FITS:
        found = trial.intermediate_values[max(trial.intermediate_values)]
    return None if found is None or math.isnan(found) else found


class MicroBatchSet(IntDistribution):
    """Micro-batches of which only some are allowed: the choices of a categorical parameter.

    Args:
        values: What is allowed, in any order.
    """

    def __init__(self, values: Iterable[int]) -> None:
        self.values = tuple(sorted(set(values)))
        super().__init__(low=self.values[0], high=self.values[-1])


def micro_batches_of(distribution: BaseDistribution | None) -> IntDistribution | None:
    """Return the micro-batches that a parameter may take, None where it is no parameter of whole numbers."""
    if isinstance(distribution, IntDistribution):
        return distribution
    if not isinstance(distribution, CategoricalDistribution):
        return None
    whole = [choice for choice in distribution.choices if isinstance(choice, int) and not isinstance(choice, bool)]
    return MicroBatchSet(whole) if len(whole) == len(distribution.choices) else None


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The trials that agree in every knob but the micro-batch."""

    key: str
    """Canonical text of ``params``."""
    params: Mapping[str, Any]
    """The knobs, without the micro-batch."""
    trials: tuple[FrozenTrial, ...]
    """All trials of the lineage, by number, those in flight included."""
    micro_batch: str = MICRO_BATCH
    """Name of the micro-batch parameter."""

    @cached_property
    def launches(self) -> tuple[FrozenTrial, ...]:
        """Trials that ran to an end of whatever kind, by number."""
        return tuple(t for t in self.trials if t.state.is_finished() and not t.user_attrs.get(VETOED_ATTR))

    @cached_property
    def taught(self) -> tuple[Evidence, ...]:
        """What each of ``trials`` says."""
        return tuple(map(evidence, self.trials))

    @cached_property
    def answers(self) -> tuple[FrozenTrial, ...]:
        """Launches that taught something of the configuration, by number; accidents are left out."""
        return tuple(t for t, says in zip(self.trials, self.taught, strict=True) if says is not Evidence.NONE)

    @cached_property
    def running(self) -> tuple[int, ...]:
        """Micro-batches in flight or enqueued."""
        return tuple(self.size(t) for t in self.trials if not t.state.is_finished())

    @cached_property
    def used(self) -> frozenset[int]:
        """Micro-batches of all trials, vetoed and failed ones included: none is proposed again."""
        return frozenset(map(self.size, self.trials))

    @cached_property
    def largest_fit(self) -> int | None:
        """Largest micro-batch known to fit."""
        return max(self._sizes(Evidence.FITS), default=None)

    @cached_property
    def smallest_too_large(self) -> int | None:
        """Smallest micro-batch known not to fit."""
        return min(self._sizes(Evidence.TOO_LARGE), default=None)

    def _sizes(self, kind: Evidence) -> list[int]:
        return [self.size(t) for t, says in zip(self.trials, self.taught, strict=True) if says is kind]

    @cached_property
    def broken(self) -> bool:
        """Whether the configuration failed for a reason that no micro-batch changes."""
        return Evidence.BROKEN in self.taught

    @cached_property
    def dead(self) -> bool:
        """Whether it does not fit at the smallest micro-batch."""
        low = 1 if self.distribution is None else self.distribution.low
        return self.smallest_too_large is not None and self.smallest_too_large <= low

    @cached_property
    def complete(self) -> bool:
        """Whether a trial has suggested all its parameters: the micro-batch comes last."""
        return any(self.micro_batch in t.params for t in self.trials)

    @cached_property
    def first_number(self) -> int:
        """Number of the first trial; -1 for a lineage without trials."""
        return self.trials[0].number if self.trials else -1

    @cached_property
    def structure(self) -> Mapping[str, Any]:
        """The knobs that decide where model states live: ZeRO stage and offload."""
        return structure(self.params)

    @cached_property
    def structure_key(self) -> str:
        """Canonical text of ``structure``."""
        return lineage_key(self.structure)

    @cached_property
    def distribution(self) -> IntDistribution | None:
        """Distribution of the micro-batch in the latest trial that has one."""
        for trial in reversed(self.trials):
            found = micro_batches_of(trial.distributions.get(self.micro_batch))
            if found is not None:
                return found
        return None

    @cached_property
    def ceiling(self) -> int | None:
        """Largest micro-batch worth trying by the latest plan; without one, the distribution's high end."""
        if self.distribution is None:
            return None
        highs = [t.system_attrs[PLAN_ATTR]["high"] for t in self.trials if "high" in _plan(t)]
        return min(self.distribution.high, int(highs[-1])) if highs else self.distribution.high

    def size(self, trial: FrozenTrial) -> int:
        """Return the micro-batch of one of the lineage's trials."""
        known = trial.params if trial.state.is_finished() else visible_params(trial, self.micro_batch)
        return int(known[self.micro_batch])

    def points(self) -> Sequence[tuple[int, float]]:
        """Return (micro-batch, metric) of all trials that showed a metric, by number."""

        def find() -> tuple[tuple[int, float], ...]:
            shown = ((t, score(t)) for t in self.trials)
            return tuple((self.size(t), value) for t, value in shown if value is not None)

        return self.derived("points", find)

    def best(self, direction: StudyDirection) -> FrozenTrial | None:
        """Return the best measured trial (state COMPLETE, value not NaN), the earliest of equals."""

        def find() -> FrozenTrial | None:
            measured = [t for t in self.trials if t.state == TrialState.COMPLETE and score(t) is not None]
            return _best(measured, direction)

        return self.derived(("best", direction), find)

    def best_score(self, direction: StudyDirection, *, answers: int | None = None) -> float | None:
        """Return the best metric among the first ``answers`` launches that taught something (all for None).

        The last report of a job stopped in flight counts, so that a stop does not hide what was seen.
        """

        def find() -> float | None:
            best = _best([t for t in self.answers[:answers] if score(t) is not None], direction)
            return None if best is None else score(best)

        return self.derived(("best score", direction, answers), find)

    def derived(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what ``compute`` derives from this lineage alone; computed once for each ``key``."""
        known = self._derived
        if key not in known:
            known[key] = compute()
        found: T = known[key]
        return found

    @cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}


@runtime_checkable
class LineageGate(Protocol):
    """What a sampler asks of the study's pruner, so that no trial is created just to be vetoed."""

    def continuable(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[str]:
        """Return the keys of the lineages that may get another launch, the most urgent first."""
        ...

    def hopeless(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[Mapping[str, Any]]:
        """Return partial knobs of which no new lineage can win any more."""
        ...


def group(trials: Iterable[FrozenTrial], *, micro_batch: str = MICRO_BATCH) -> dict[str, Lineage]:
    """Group trials into lineages, ordered by their first trial.

    Trials without an integer micro-batch parameter are foreign and left out. The parameters of unfinished
    trials are completed by what they are going to be: the parameters they were enqueued with, and a sampler's
    plan.
    """
    members: dict[str, list[FrozenTrial]] = {}
    params: dict[str, dict[str, Any]] = {}
    for trial in sorted(trials, key=lambda t: t.number):
        knobs = visible_params(trial, micro_batch)
        size = knobs.pop(micro_batch, None)
        if isinstance(size, bool) or not isinstance(size, int):
            continue
        key = lineage_key(knobs)
        members.setdefault(key, []).append(trial)
        params.setdefault(key, knobs)
    return {
        key: Lineage(key=key, params=params[key], trials=tuple(found), micro_batch=micro_batch)
        for key, found in members.items()
    }


def lineage_key(params: Mapping[str, Any], *, micro_batch: str = MICRO_BATCH) -> str:
    """Return the canonical text of knobs: sorted, without the micro-batch, 5e7 and 50000000 alike."""
    knobs = {name: canonical(value) for name, value in params.items() if name != micro_batch}
    return json.dumps(knobs, sort_keys=True, default=repr)


def structure(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs that decide where model states live: ZeRO stage and offload."""
    return {name: params[name] for name in STRUCTURE if name in params}


def agrees(params: Mapping[str, Any], other: Mapping[str, Any], *, strict: bool = False) -> bool:
    """Return whether knobs have the values of ``other`` where both have them (all of them if strict)."""
    missing = object()
    for name, value in other.items():
        found = params.get(name, missing)
        if found is missing:
            if strict:
                return False
        elif canonical(found) != canonical(value) or isinstance(found, bool) != isinstance(value, bool):
            return False
    return True


def unreachable(trials: Iterable[FrozenTrial], *, micro_batch: str = MICRO_BATCH) -> frozenset[str]:
    """Return the keys of lineages that were planned but became another one once suggested.

    So it is with lineages of another space (trials with further parameters): planning them again would never
    end.
    """
    missed = set()
    for trial in trials:
        plan = _plan(trial)
        if micro_batch in trial.params and "lineage" in plan:
            planned = lineage_key(plan["lineage"], micro_batch=micro_batch)
            if planned != lineage_key(trial.params, micro_batch=micro_batch):
                missed.add(planned)
    return frozenset(missed)


def search_interval(lineage: Lineage, ceiling: int, *, floor: int = 1) -> tuple[int, int]:
    """Return the bounds (low, high) that a bisection has left; it is finished when low > high.

    ``low = largest micro-batch that fits + 1`` and ``high = smallest that does not - 1``, within [floor,
    ceiling].

    Args:
        lineage: The lineage.
        ceiling: Largest micro-batch worth trying.
        floor: Smallest micro-batch allowed.
    """
    low = floor if lineage.largest_fit is None else max(floor, lineage.largest_fit + 1)
    high = ceiling if lineage.smallest_too_large is None else min(ceiling, lineage.smallest_too_large - 1)
    return low, high


def past_peak(lineage: Lineage, direction: StudyDirection) -> bool:
    """Return whether a micro-batch was measured to be worse than a smaller one, by more than ``PEAK_MARGIN``."""
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    points = sorted((sign * value, size) for size, value in lineage.points())
    if not points:
        return False
    best, peak = points[0]
    return any(size > peak and cost > best + PEAK_MARGIN * abs(best) for cost, size in points)


def peak_gap(lineage: Lineage, distribution: IntDistribution, direction: StudyDirection) -> Sequence[int]:
    """Return the unused micro-batches among which the best one lies, once a larger one was measured as worse.

    With one peak, the best micro-batch lies between the measured neighbours of the best measured one. The wider of
    the two gaps beside it is returned; nothing before the peak was passed, or where both gaps are narrower than
    ``PEAK_WIDTH`` of the micro-batch itself.

    Args:
        lineage: The lineage.
        distribution: Of the micro-batch.
        direction: What is better.
    """
    if not past_peak(lineage, direction):
        return ()
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    _, peak = min((sign * value, size) for size, value in lineage.points())
    sizes = {size for size, _ in lineage.points()}
    left = max((size for size in sizes if size < peak), default=distribution.low - 1)
    right = min(size for size in sizes if size > peak)
    gaps = [
        candidates(left + 1, peak - 1, distribution, used=lineage.used),
        candidates(peak + 1, right - 1, distribution, used=lineage.used),
    ]
    widest = max(gaps, key=len)
    if isinstance(distribution, MicroBatchSet):
        return widest  # few enough to try them all
    return widest if len(widest) * distribution.step > PEAK_WIDTH * peak else ()


def candidates(low: int, high: int, distribution: IntDistribution, *, used: Iterable[int] = ()) -> Sequence[int]:
    """Return the unused micro-batches of [low, high] that the distribution holds, ascending."""
    if isinstance(distribution, MicroBatchSet):
        taken = set(used)
        return [value for value in distribution.values if low <= value <= high and value not in taken]
    step = distribution.step
    start = max(distribution.low, distribution.low + -((distribution.low - low) // step) * step)
    allowed = range(start, min(high, distribution.high) + 1, step)
    taken = {value for value in used if value in allowed}
    return [value for value in allowed if value not in taken] if taken else allowed


def middle(values: Sequence[int]) -> int:
    """Return the middle of ascending values, the lower of two: of lo..hi it is ``(lo + hi) // 2``."""
    return values[(len(values) - 1) // 2]


def visible_params(trial: FrozenTrial, micro_batch: str = MICRO_BATCH) -> dict[str, Any]:
    """Return a trial's parameters; an unfinished trial's are completed by those it is going to have."""
    if trial.state.is_finished():
        return dict(trial.params)
    plan = _plan(trial)
    planned = {**plan["lineage"], micro_batch: plan["micro_batch"]} if "lineage" in plan else {}
    return {**planned, **(trial.system_attrs.get(_FIXED_ATTR) or {}), **trial.params}


def _plan(trial: FrozenTrial) -> Mapping[str, Any]:
    plan: Mapping[str, Any] = trial.system_attrs.get(PLAN_ATTR) or {}
    return plan


def _best(trials: Sequence[FrozenTrial], direction: StudyDirection) -> FrozenTrial | None:
    if not trials:
        return None
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    return min(trials, key=lambda t: (sign * (score(t) or 0.0), t.number))


def canonical(value: Any) -> Any:
    """Return a knob's value in one form: 5e7 as 50000000."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
