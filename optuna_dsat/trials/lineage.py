"""Trial history as lineages: pure functions over frozen trials.

A lineage is the set of trials that agree in every knob except the micro-batch. Memory use grows with the micro-batch,
so the result of a trial (fits, or too large) bounds the micro-batches of the others. Samplers and pruners decide on
lineages only, so any worker can continue any study.

Trials are read through the user attributes ``outcome`` (value of ``Outcome``) and ``vetoed`` (reason why the trial was
finished without a launch). If a study sets neither, its trials are read by their state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.config.conditions import OFFLOAD_OPTIMIZER as OFFLOAD_OPTIMIZER
from optuna_dsat.config.conditions import OFFLOAD_PARAM as OFFLOAD_PARAM
from optuna_dsat.config.conditions import ZERO_STAGE as ZERO_STAGE
from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, canonical_number
from optuna_dsat.config.ds_config import MICRO_BATCH as MICRO_BATCH
from optuna_dsat.outcome import Outcome
from optuna_dsat.trials.attributes import OUTCOME, VETOED

STRUCTURE = (ZERO_STAGE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)
"""Knobs that determine where model states are stored, and hence memory use and communication."""

PLAN_ATTR = "dsat:plan"
"""System attribute: the configuration a sampler plans for a trial, set before its parameters are suggested."""
RETRY_ATTR = "failed_trial"
"""System attribute that Optuna's ``RetryHeartbeatStaleTrialCallback`` sets on the retry of a lost trial."""

PEAK_MARGIN = 0.03
"""Relative difference between two metrics of a lineage above which it is not considered noise."""
PEAK_WIDTH = 0.1
"""Relative width of the gap next to a peak at which the search stops: the metric is flat there."""

FIXED_ATTR = "fixed_params"
"""System attribute with the parameters of ``Study.enqueue_trial`` (Optuna 5)."""


class Feasibility(StrEnum):
    """Feasibility of a trial's micro-batch."""

    FITS = "fits"
    """A full step ran."""
    TOO_LARGE = "too_large"
    """The device or the host ran out of memory, or the script ran out of data."""
    BROKEN = "broken"
    """The configuration fails at any micro-batch: DeepSpeed rejected it, or the script raised an error."""
    UNKNOWN = "unknown"
    """Not finished, never launched, or failed for a reason unrelated to the configuration."""


def feasibility(trial: FrozenTrial) -> Feasibility:
    """Return the feasibility of a trial's micro-batch.

    A trial stopped after a full step fits. Running out of memory counts even if steps were reported before. In a study
    that sets no ``outcome``, a pruned trial without reports counts as too large: studies mark infeasible configurations
    this way.
    """
    if not trial.state.is_finished() or trial.user_attrs.get(VETOED):
        return Feasibility.UNKNOWN
    outcome = trial.user_attrs.get(OUTCOME)
    if trial.state == TrialState.COMPLETE:
        return Feasibility.FITS
    if trial.state == TrialState.FAIL:
        broken = outcome in (Outcome.INVALID_CONFIG, Outcome.SCRIPT_ERROR, Outcome.STALLED)
        return Feasibility.BROKEN if broken else Feasibility.UNKNOWN
    if outcome in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY, Outcome.OUT_OF_DATA):
        return Feasibility.TOO_LARGE
    if trial.intermediate_values:
        return Feasibility.FITS
    return Feasibility.TOO_LARGE if outcome is None else Feasibility.UNKNOWN


def score(trial: FrozenTrial) -> float | None:
    """Return a trial's metric: its value, or the last report of a stopped trial; None without a number."""
    result: float | None = None
    if trial.state == TrialState.COMPLETE and trial.values is not None and len(trial.values) == 1:
        result = trial.values[0]
    elif trial.state == TrialState.PRUNED and feasibility(trial) is Feasibility.FITS:
        result = trial.intermediate_values[max(trial.intermediate_values)]
    return None if result is None or math.isnan(result) else result


class MicroBatchSet(IntDistribution):
    """An explicit set of allowed micro-batches: the choices of a categorical parameter."""

    def __init__(self, values: Iterable[int]) -> None:
        self.values = tuple(sorted(set(values)))
        super().__init__(low=self.values[0], high=self.values[-1])


def micro_batches_of(distribution: BaseDistribution | None) -> IntDistribution | None:
    """Return the possible micro-batches of a parameter, None if its values are not all integers."""
    if isinstance(distribution, IntDistribution):
        return distribution
    if not isinstance(distribution, CategoricalDistribution):
        return None
    whole = [choice for choice in distribution.choices if isinstance(choice, int) and not isinstance(choice, bool)]
    return MicroBatchSet(whole) if len(whole) == len(distribution.choices) else None


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The trials that agree in every knob except the micro-batch."""

    key: str
    """Canonical text of ``params``."""
    params: Mapping[str, Any]
    """The knobs, without the micro-batch."""
    trials: tuple[FrozenTrial, ...]
    """All trials of the lineage, by number, including running trials."""
    micro_batch: str = MICRO_BATCH
    """Name of the micro-batch parameter."""

    @cached_property
    def feasibilities(self) -> tuple[Feasibility, ...]:
        """Feasibility shown by each of ``trials``."""
        return tuple(map(feasibility, self.trials))

    @cached_property
    def conclusive(self) -> tuple[FrozenTrial, ...]:
        """Launches that show the configuration's feasibility, by number, without unrelated failures."""
        shown = zip(self.trials, self.feasibilities, strict=True)
        return tuple(t for t, result in shown if result is not Feasibility.UNKNOWN)

    @cached_property
    def running(self) -> tuple[int, ...]:
        """Micro-batches of running or enqueued trials."""
        return tuple(self.size(t) for t in self.trials if not t.state.is_finished())

    @cached_property
    def used(self) -> frozenset[int]:
        """Micro-batches of all trials, including vetoed and failed trials: they are not proposed again."""
        return frozenset(map(self.size, self.trials))

    @cached_property
    def largest_fit(self) -> int | None:
        """Largest micro-batch known to fit, or None."""
        return max(self._sizes(Feasibility.FITS), default=None)

    @cached_property
    def smallest_too_large(self) -> int | None:
        """Smallest micro-batch known not to fit, or None."""
        return min(self._sizes(Feasibility.TOO_LARGE), default=None)

    def _sizes(self, wanted: Feasibility) -> list[int]:
        return [self.size(t) for t, result in zip(self.trials, self.feasibilities, strict=True) if result is wanted]

    @cached_property
    def broken(self) -> bool:
        """Whether the configuration failed for a reason independent of the micro-batch."""
        return Feasibility.BROKEN in self.feasibilities

    @cached_property
    def dead(self) -> bool:
        """Whether the smallest micro-batch does not fit."""
        low = 1 if self.distribution is None else self.distribution.low
        return self.smallest_too_large is not None and self.smallest_too_large <= low

    @cached_property
    def complete(self) -> bool:
        """Whether some trial has all its parameters: the micro-batch is suggested last."""
        return any(self.micro_batch in t.params for t in self.trials)

    @cached_property
    def first_number(self) -> int:
        """Number of the first trial, -1 without trials."""
        return self.trials[0].number if self.trials else -1

    @cached_property
    def structure(self) -> Mapping[str, Any]:
        """The structure: the knobs of ``STRUCTURE`` (ZeRO stage and offload) that it has."""
        return structure(self.params)

    @cached_property
    def structure_key(self) -> str:
        """Canonical text of ``structure``."""
        return lineage_key(self.structure)

    @cached_property
    def distribution(self) -> IntDistribution | None:
        """Distribution of the micro-batch in the latest trial that has it, or None."""
        for trial in reversed(self.trials):
            distribution = micro_batches_of(trial.distributions.get(self.micro_batch))
            if distribution is not None:
                return distribution
        return None

    @cached_property
    def ceiling(self) -> int | None:
        """Largest micro-batch worth a launch: from the latest plan, else the distribution's upper end; else None."""
        if self.distribution is None:
            return None
        highs = [t.system_attrs[PLAN_ATTR]["high"] for t in self.trials if "high" in _plan(t)]
        return min(self.distribution.high, int(highs[-1])) if highs else self.distribution.high

    def size(self, trial: FrozenTrial) -> int:
        """Return the micro-batch of one of the lineage's trials."""
        known = trial.params if trial.state.is_finished() else visible_params(trial, self.micro_batch)
        return int(known[self.micro_batch])

    @cached_property
    def scored(self) -> Sequence[tuple[FrozenTrial, float]]:
        """All trials with a metric, and the metric, by number; the last report of a stopped trial counts."""
        shown = ((trial, score(trial)) for trial in self.trials)
        return tuple((trial, value) for trial, value in shown if value is not None)

    @cached_property
    def points(self) -> Sequence[tuple[int, float]]:
        """(Micro-batch, metric) of all trials with a metric, by number."""
        return tuple((self.size(trial), value) for trial, value in self.scored)

    def best(self, direction: StudyDirection) -> FrozenTrial | None:
        """Return the best completed trial with a metric, the earliest of ties, or None."""
        measured = [(trial, value) for trial, value in self.scored if trial.state == TrialState.COMPLETE]
        return _best(measured, direction)[0]

    def best_score(self, direction: StudyDirection, *, first: int | None = None) -> float | None:
        """Return the best metric among the first ``first`` conclusive launches, None for all; None without a metric."""
        launched = {trial.number for trial in self.conclusive[:first]}
        return _best([item for item in self.scored if item[0].number in launched], direction)[1]


@runtime_checkable
class LineageGate(Protocol):
    """Interface of pruners for samplers, which avoids creating trials just to veto them."""

    def continuable(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[str]:
        """Return the keys of the lineages that may get another launch, most urgent first."""

    def hopeless(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[Mapping[str, Any]]:
        """Return structures (partial knobs) whose new lineages cannot win."""


def group(trials: Iterable[FrozenTrial], *, micro_batch: str = MICRO_BATCH) -> dict[str, Lineage]:
    """Group trials into lineages, ordered by their first trial.

    Trials without an integer micro-batch parameter are ignored, as are trials with accumulation steps of their own,
    which answer another question. Parameters of unfinished trials are completed by their enqueued parameters and the
    sampler's plan.
    """
    members: dict[str, list[FrozenTrial]] = {}
    params: dict[str, dict[str, Any]] = {}
    for trial in sorted(trials, key=lambda t: t.number):
        knobs = visible_params(trial, micro_batch)
        size = knobs.pop(micro_batch, None)
        if isinstance(size, bool) or not isinstance(size, int) or GRADIENT_ACCUMULATION in knobs:
            continue
        key = lineage_key(knobs)
        members.setdefault(key, []).append(trial)
        params.setdefault(key, knobs)
    return {
        key: Lineage(key=key, params=params[key], trials=tuple(result), micro_batch=micro_batch)
        for key, result in members.items()
    }


_canonical_text = json.JSONEncoder(sort_keys=True, default=repr).encode
"""Shared encoder: ``json.dumps`` creates an encoder per call, and the table of a space has a key per row."""


def lineage_key(params: Mapping[str, Any], *, micro_batch: str = MICRO_BATCH) -> str:
    """Return the canonical text of knobs: sorted, without the micro-batch; 5e7 equals 50000000."""
    knobs = {name: canonical_number(value) for name, value in params.items() if name != micro_batch}
    return _canonical_text(knobs)


def structure(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the structure of a configuration: the knobs of ``STRUCTURE`` that it has."""
    return {name: params[name] for name in STRUCTURE if name in params}


def agrees(params: Mapping[str, Any], other: Mapping[str, Any], *, strict: bool = False) -> bool:
    """Return whether shared knobs equal the values in ``other``; if strict, all knobs of ``other`` are required."""
    missing = object()
    for name, value in other.items():
        result = params.get(name, missing)
        if result is missing:
            if strict:
                return False
        elif canonical_number(result) != canonical_number(value) or isinstance(result, bool) != isinstance(value, bool):
            return False
    return True


def unreachable(trials: Iterable[FrozenTrial], *, micro_batch: str = MICRO_BATCH) -> frozenset[str]:
    """Return the keys of lineages that were planned but became another lineage when suggested.

    This happens with lineages of another space (trials with further parameters); they would be planned forever.
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
    """Return the remaining interval (low, high) of a bisection within [floor, ceiling]; it is over when low > high."""
    low = floor if lineage.largest_fit is None else max(floor, lineage.largest_fit + 1)
    high = ceiling if lineage.smallest_too_large is None else min(ceiling, lineage.smallest_too_large - 1)
    return low, high


def past_peak(lineage: Lineage, direction: StudyDirection) -> bool:
    """Return whether a micro-batch above the best was measured to be worse by more than ``PEAK_MARGIN``."""
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    points = sorted((sign * value, size) for size, value in lineage.points)
    if not points:
        return False
    best, peak = points[0]
    return any(size > peak and cost > best + PEAK_MARGIN * abs(best) for cost, size in points)


def peak_gap(lineage: Lineage, distribution: IntDistribution, direction: StudyDirection) -> Sequence[int]:
    """Return the unused micro-batches around the peak of the metric, once a larger micro-batch was measured as worse.

    If the metric has a single peak, the best micro-batch is between the measured neighbours of the best measured value.
    The wider of these two gaps is returned; an empty result means that the peak was not passed yet, or that both gaps
    are narrower than ``PEAK_WIDTH`` times the best micro-batch.
    """
    if not past_peak(lineage, direction):
        return ()
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    _, peak = min((sign * value, size) for size, value in lineage.points)
    sizes = {size for size, _ in lineage.points}
    left = max((size for size in sizes if size < peak), default=distribution.low - 1)
    right = min(size for size in sizes if size > peak)
    gaps = [
        unused_micro_batches(left + 1, peak - 1, distribution, used=lineage.used),
        unused_micro_batches(peak + 1, right - 1, distribution, used=lineage.used),
    ]
    widest = max(gaps, key=len)
    if isinstance(distribution, MicroBatchSet):
        return widest  # few enough to try all
    return widest if len(widest) * distribution.step > PEAK_WIDTH * peak else ()


def unused_micro_batches(
    low: int, high: int, distribution: IntDistribution, *, used: Iterable[int] = ()
) -> Sequence[int]:
    """Return the unused micro-batches in [low, high] that the distribution contains, ascending."""
    if isinstance(distribution, MicroBatchSet):
        taken = set(used)
        return [value for value in distribution.values if low <= value <= high and value not in taken]
    step = distribution.step
    start = max(distribution.low, distribution.low + -((distribution.low - low) // step) * step)
    allowed = range(start, min(high, distribution.high) + 1, step)
    taken = {value for value in used if value in allowed}
    return [value for value in allowed if value not in taken] if taken else allowed


def middle(values: Sequence[int]) -> int:
    """Return the lower median of ascending values: ``(low + high) // 2`` for the integers low..high."""
    return values[(len(values) - 1) // 2]


def visible_params(trial: FrozenTrial, micro_batch: str = MICRO_BATCH) -> dict[str, Any]:
    """Return a trial's parameters; for unfinished trials including planned and enqueued parameters."""
    if trial.state.is_finished():
        return dict(trial.params)
    plan = _plan(trial)
    planned = {**plan["lineage"], micro_batch: plan["micro_batch"]} if "lineage" in plan else {}
    return {**planned, **(trial.system_attrs.get(FIXED_ATTR) or {}), **trial.params}


def without_batch(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return params without micro-batch and accumulation steps: the knobs by which the models know a lineage."""
    return {name: value for name, value in params.items() if name not in (MICRO_BATCH, GRADIENT_ACCUMULATION)}


def _plan(trial: FrozenTrial) -> Mapping[str, Any]:
    plan: Mapping[str, Any] = trial.system_attrs.get(PLAN_ATTR) or {}
    return plan


def _best(
    scored: Sequence[tuple[FrozenTrial, float]], direction: StudyDirection
) -> tuple[FrozenTrial, float] | tuple[None, None]:
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    return min(scored, key=lambda item: (sign * item[1], item[0].number), default=(None, None))
