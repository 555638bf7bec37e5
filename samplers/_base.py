"""What the samplers over lineages share: which lineage a trial continues, and how a new one is drawn."""

from __future__ import annotations

import abc
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.lineage import (
    MICRO_BATCH,
    PLAN_ATTR,
    Lineage,
    LineageGate,
    agrees,
    candidates,
    group,
    lineage_key,
    middle,
    unreachable,
)
from optuna_dsat.samplers._draw import closed, draw, draw_choice, generator

__all__ = ["LineageSampler", "MaxMicroBatch", "Proposal"]

MaxMicroBatch = Callable[[Mapping[str, Any], Sequence[FrozenTrial]], int]
"""Largest micro-batch worth trying: (knobs of a lineage, trials of the study) -> samples per GPU."""

_SEED_ATTR = "dsat:sampler_seed"
_RETRY_ATTR = "failed_trial"  # set by Optuna's RetryHeartbeatStaleTrialCallback on the copy of a lost trial
_PLAN_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A micro-batch to try next, and the bounds it was drawn from."""

    micro_batch: int
    low: int
    high: int


class LineageSampler(BaseSampler):
    """Base of the samplers that tune the micro-batch inside lineages.

    ``before_trial`` decides: the trial continues a lineage that can progress, or opens a new one. The
    decision is stored on the trial before any parameter is suggested, so that other workers do not take the
    same. All decisions are functions of the study's history; random draws depend on ``(seed, number of the
    trial, name of the parameter)``. A trial that repeats a lost one draws what that one drew, and repeats do
    not shift the draws of later trials. So a study that is stopped and resumed, by whatever worker, goes on
    as if never stopped.

    A lineage with a trial in flight is left alone, since its next micro-batch depends on the answer: k
    workers work on up to k lineages. Lineages that the study's pruner holds back (see ``LineageGate``) are
    not continued.

    Args:
        search_range_factor: Multiplies ``max_micro_batch``.
        max_micro_batch: Largest micro-batch worth trying for given knobs; None for the high end of the
            micro-batch's distribution, which is always respected.
        micro_batch: Name of the micro-batch's parameter. It must be an integer parameter, suggested last.
        seed: Seed of the draws; None draws one for the study and stores it there.

    Raises:
        ValueError: If ``search_range_factor`` is not positive or the micro-batch has no name.
    """

    def __init__(
        self,
        *,
        search_range_factor: float = 1.0,
        max_micro_batch: MaxMicroBatch | None = None,
        micro_batch: str = MICRO_BATCH,
        seed: int | None = None,
    ) -> None:
        if not search_range_factor > 0:
            raise ValueError(
                f"search_range_factor must be above 0, not {search_range_factor}: 1.0 trusts the memory model"
            )
        if not micro_batch:
            raise ValueError("micro_batch must name the micro-batch parameter of the study, not be empty")
        self._factor = search_range_factor
        self._max_micro_batch = max_micro_batch
        self._name = micro_batch
        self._seed = seed

    @abc.abstractmethod
    def _propose(
        self,
        study: Study,
        lineage: Lineage,
        distribution: IntDistribution,
        *,
        lineages: Mapping[str, Lineage],
        history: Sequence[FrozenTrial],
        rng: random.Random,
    ) -> Proposal | None:
        """Return the next micro-batch of a lineage (one without trials is new), None if it is finished."""

    def exhausted(self, study: Study, classes: int | None = None) -> bool:
        """Return whether the search is over because the space is: nothing in flight, nothing left to propose.

        What the study's pruner calls hopeless is not left to propose.

        Args:
            study: The study.
            classes: Number of lineages of the space. None to read the space off the trials, which finds the
            end of a
                purely categorical space all of whose lineages were opened.
        """
        history = study.get_trials(deepcopy=False)
        if any(not trial.state.is_finished() for trial in history):
            return False
        lineages = group(history, micro_batch=self._name)
        rng = generator("exhausted")
        if any(
            self._propose(study, o, o.distribution, lineages=lineages, history=history, rng=rng)
            for o in self._ready(study, lineages, history, {})
            if o.distribution is not None
        ):
            return False
        opened = [lineage for lineage in lineages.values() if lineage.complete]
        gate = study.pruner
        hopeless = gate.hopeless(study, lineages) if isinstance(gate, LineageGate) else ()
        return (classes is not None and len(opened) >= classes) or closed({}, opened, hopeless)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Decide which lineage the trial continues, or that it opens one, and store that on the trial."""
        if len(study.directions) > 1:
            return  # refused with a message as soon as a parameter is suggested
        fixed = {**(trial.system_attrs.get("fixed_params") or {}), **trial.params}
        if self._name in fixed or PLAN_ATTR in trial.system_attrs:
            return  # enqueued with its micro-batch, or the copy of a lost trial: it runs what it was made for
        for _ in range(_PLAN_ATTEMPTS):
            history = _others(study, trial)
            plan = self._plan(study, trial, history, fixed)
            study._storage.set_trial_system_attr(trial._trial_id, PLAN_ATTR, plan)
            if not self._taken(plan, trial, _others(study, trial)):
                return

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return no parameters: all are sampled one by one."""
        del study, trial
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return no parameters: all are sampled one by one."""
        del trial, search_space
        self._raise_error_if_multi_objective(study)
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the planned value of a parameter, or draw it."""
        self._raise_error_if_multi_objective(study)
        plan = trial.system_attrs.get(PLAN_ATTR) or {}
        rng = generator(self._study_seed(study), plan.get("draw", trial.number), param_name)
        if param_name == self._name and isinstance(param_distribution, IntDistribution):
            return self._sample_micro_batch(study, trial, param_distribution, plan, rng)
        planned = plan.get("lineage", {})
        if param_name in planned and _holds(param_distribution, planned[param_name]):
            return planned[param_name]
        if not isinstance(param_distribution, CategoricalDistribution):
            return draw(rng, param_distribution)
        history = _others(study, trial)
        lineages = group(history, micro_batch=self._name)
        gate = study.pruner
        return draw_choice(
            rng,
            param_name,
            param_distribution,
            params=trial.params,
            lineages=list(lineages.values()),
            opening=[t.params for t in history if t.state == TrialState.RUNNING and self._name not in t.params],
            hopeless=gate.hopeless(study, lineages) if isinstance(gate, LineageGate) else (),
            direction=study.direction,
        )

    def reseed_rng(self) -> None:
        """Do nothing: draws depend on the study alone, so workers cannot repeat each other's."""

    def _plan(
        self, study: Study, trial: FrozenTrial, history: Sequence[FrozenTrial], fixed: Mapping[str, Any]
    ) -> dict[str, Any]:
        number = _draw_number(trial, history)
        rng = generator(self._study_seed(study), number, self._name)
        lineages = group(history, micro_batch=self._name)
        for lineage in self._ready(study, lineages, history, fixed):
            if lineage.distribution is None:
                continue
            proposal = self._propose(study, lineage, lineage.distribution, lineages=lineages, history=history, rng=rng)
            if proposal is not None:
                return {"draw": number, "lineage": dict(lineage.params), **_bounds_of(proposal)}
        return {"draw": number}

    def _ready(
        self,
        study: Study,
        lineages: Mapping[str, Lineage],
        history: Sequence[FrozenTrial],
        fixed: Mapping[str, Any],
    ) -> list[Lineage]:
        """Return the lineages that another trial may continue, the most urgent first."""
        gate = study.pruner
        keys = gate.continuable(study, lineages) if isinstance(gate, LineageGate) else list(lineages)
        missed = unreachable(history, micro_batch=self._name)
        found = (lineages[key] for key in keys if key not in missed)
        return [o for o in found if o.complete and not o.running and not o.broken and agrees(o.params, fixed)]

    def _taken(self, plan: Mapping[str, Any], trial: FrozenTrial, others: Sequence[FrozenTrial]) -> bool:
        """Return whether an earlier trial in flight planned the same lineage at the same time."""
        if "lineage" not in plan:
            return False
        key = lineage_key(plan["lineage"], micro_batch=self._name)
        rivals = [t for t in others if t.number < trial.number and not t.state.is_finished()]
        return key in group(rivals, micro_batch=self._name)

    def _sample_micro_batch(
        self,
        study: Study,
        trial: FrozenTrial,
        distribution: IntDistribution,
        plan: Mapping[str, Any],
        rng: random.Random,
    ) -> int:
        params = {name: value for name, value in trial.params.items() if name != self._name}
        key = lineage_key(params)
        history = _others(study, trial)
        lineages = group(history, micro_batch=self._name)
        empty = Lineage(key=key, params=params, trials=(), micro_batch=self._name)
        lineage = lineages.get(key, empty)
        if "lineage" in plan and lineage_key(plan["lineage"], micro_batch=self._name) == key:
            planned = int(plan["micro_batch"])
            if _holds(distribution, planned):
                return planned
        proposal = self._propose(study, lineage, distribution, lineages=lineages, history=history, rng=rng)
        if proposal is None:
            return self._leftover(lineage, distribution, history)
        study._storage.set_trial_system_attr(trial._trial_id, PLAN_ATTR, {**plan, **_bounds_of(proposal)})
        return proposal.micro_batch

    def _leftover(self, lineage: Lineage, distribution: IntDistribution, history: Sequence[FrozenTrial]) -> int:
        """Return an unused micro-batch of a lineage that has nothing to learn, any if all were used."""
        top = self._ceiling(lineage.params, history, distribution)
        if lineage.smallest_too_large is not None:
            top = min(top, lineage.smallest_too_large - 1)
        unused = candidates(distribution.low, top, distribution, used=lineage.used)
        return middle(unused or candidates(distribution.low, distribution.high, distribution))

    def _ceiling(self, params: Mapping[str, Any], history: Sequence[FrozenTrial], distribution: IntDistribution) -> int:
        """Return the largest micro-batch worth trying, within the distribution."""
        largest = distribution.high if self._max_micro_batch is None else self._max_micro_batch(params, history)
        return int(min(distribution.high, max(distribution.low, self._factor * largest)))

    def _study_seed(self, study: Study) -> int:
        if self._seed is not None:
            return self._seed
        stored = study._storage.get_study_system_attrs(study._study_id).get(_SEED_ATTR)
        if stored is None:
            study._storage.set_study_system_attr(study._study_id, _SEED_ATTR, secrets.randbits(32))
            stored = study._storage.get_study_system_attrs(study._study_id)[_SEED_ATTR]
        return int(stored)


def _others(study: Study, trial: FrozenTrial) -> list[FrozenTrial]:
    return [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]


def _draw_number(trial: FrozenTrial, history: Sequence[FrozenTrial]) -> int:
    """Return the number that draws depend on: the trial's own, less the copies of lost trials before it."""
    number = int(trial.system_attrs.get(_RETRY_ATTR, trial.number))
    return number - sum(_RETRY_ATTR in other.system_attrs for other in history if other.number < number)


def _bounds_of(proposal: Proposal) -> dict[str, int]:
    return {"micro_batch": proposal.micro_batch, "low": proposal.low, "high": proposal.high}


def _holds(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except (ValueError, TypeError):
        return False  # a value of another space
