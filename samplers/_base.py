"""Base class of the samplers over lineages: choose the lineage that a trial continues, or draw a new lineage."""

from __future__ import annotations

import abc
import hashlib
import random
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.trials.attributes import PURPOSE, root_launch, waiting_launch
from optuna_dsat.trials.failures import StructureFailures, structure_failures
from optuna_dsat.trials.history import StudyHistory, all_opened, read_history
from optuna_dsat.trials.lineage import (
    FIXED_ATTR,
    MICRO_BATCH,
    PLAN_ATTR,
    RETRY_ATTR,
    Feasibility,
    Lineage,
    LineageGate,
    MicroBatchSet,
    agrees,
    group,
    lineage_key,
    micro_batches_of,
    middle,
    unused_micro_batches,
)

_SEED_ATTR = "dsat:sampler_seed"
_PLAN_ATTEMPTS = 3
_MISSING = object()
_AT_RANDOM = "drawn at random"


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The next micro-batch of a lineage, and the interval it was drawn from."""

    micro_batch: int
    low: int
    high: int


class LineageSampler(BaseSampler):
    """Base class of the samplers that tune the micro-batch inside lineages.

    ``before_trial`` decides whether the trial continues a lineage or opens a new lineage, and stores the decision on
    the trial before any parameter is suggested, so that other workers do not make the same choice. All decisions are
    functions of the study's history; random draws depend on ``(seed, number of the trial, name of the parameter)``. The
    retry of a lost trial draws the same values, and retries do not shift the draws of later trials. A study that is
    stopped and resumed, by any worker, therefore continues as if never stopped.

    A lineage with a running trial is skipped, since its next micro-batch depends on the result: k workers work on
    up to k lineages. Lineages that the study's pruner holds back (see ``LineageGate``) are not continued.

    Args:
        search_range_factor: Multiplies the largest micro-batch that the planner expects to fit.
        planner: Draws new lineages and limits micro-batches by its posterior; None to draw knobs at random. Its
            micro-batch is named ``train_micro_batch_size_per_gpu``.
        micro_batch: Name of the micro-batch's parameter. It must be an integer parameter, or a categorical parameter
            of whole numbers, suggested last.
        seed: Seed of the draws; None draws a seed for the study and stores it there.

    Raises:
        ValueError: If ``search_range_factor`` is not positive or the micro-batch has no name; in a study, if the
            micro-batch has values other than whole numbers, or a measured trial has no micro-batch.
    """

    def __init__(
        self,
        *,
        search_range_factor: float = 1.0,
        planner: GuidedPlanner | None = None,
        micro_batch: str = MICRO_BATCH,
        seed: int | None = None,
    ) -> None:
        if not search_range_factor > 0:
            raise ValueError(
                f"search_range_factor must be above 0, not {search_range_factor}: 1.0 trusts the memory model"
            )
        if not isinstance(micro_batch, str) or not micro_batch:
            raise ValueError(f"micro_batch must name the micro-batch parameter of the study; got {micro_batch!r}")
        if planner is not None and micro_batch != MICRO_BATCH:
            raise ValueError(f"micro_batch is {micro_batch!r}; with a planner it must be {MICRO_BATCH!r}")
        self._factor = search_range_factor
        self._planner = planner
        self._name = micro_batch
        self._seed = seed

    @abc.abstractmethod
    def _propose(
        self,
        study: Study,
        lineage: Lineage,
        distribution: IntDistribution,
        *,
        history: StudyHistory,
        rng: random.Random,
    ) -> Proposal | None:
        """Return the next micro-batch of a lineage, which may have no trials yet; None if the lineage is finished."""

    def exhausted(self, study: Study, classes: int | None = None) -> bool:
        """Return whether the space is exhausted: no running trial and nothing left to propose.

        Structures that fail, or that the study's pruner considers hopeless, are ignored.

        ``classes`` is the number of lineages of the space; None infers the space from the trials, which works for
        purely categorical spaces once all lineages were opened.
        """
        history = read_history(study, micro_batch=self._name)
        if history.pending:
            return False
        rng = generator("exhausted")
        if any(
            self._next(study, lineage, lineage.distribution, history=history, rng=rng)
            for lineage in self._ready(study, history, {})
            if lineage.distribution is not None
        ):
            return False
        opened = [lineage for lineage in history.lineages.values() if lineage.complete]
        return (classes is not None and len(opened) >= classes) or all_opened(
            {}, opened, self._hopeless(study, history)
        )

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Decide which lineage the trial continues or opens, and store the decision on the trial."""
        if len(study.directions) > 1:
            return  # rejected with a message when a parameter is suggested
        fixed = {**(trial.system_attrs.get(FIXED_ATTR) or {}), **trial.params}
        if self._name in fixed or PLAN_ATTR in trial.system_attrs:
            return  # enqueued with its micro-batch, or the retry of a lost trial: its configuration is given
        for _ in range(_PLAN_ATTEMPTS):
            plan = self._plan(study, trial, self._history(study, trial), fixed)
            study._storage.set_trial_system_attr(trial._trial_id, PLAN_ATTR, plan)
            if "lineage" not in plan or not self._taken(plan["lineage"], trial, self._history(study, trial)):
                return

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return no parameters: all are sampled independently."""
        del study, trial
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return no parameters: all are sampled independently."""
        del trial, search_space
        self._raise_error_if_multi_objective(study)
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the planned value of a parameter, or draw a value; of knobs that are numbers, as Optuna draws them."""
        self._raise_error_if_multi_objective(study)
        plan: Mapping[str, Any] = trial.system_attrs.get(PLAN_ATTR) or {}
        sizes = micro_batches_of(param_distribution) if param_name == self._name else None
        is_micro_batch = sizes is not None
        planned = plan.get("micro_batch") if is_micro_batch else plan.get("lineage", {}).get(param_name, _MISSING)
        if is_micro_batch and not self._follows(trial, plan):
            planned = _MISSING
        if planned is not _MISSING and _holds(param_distribution, planned):
            return planned
        rng = generator(self._study_seed(study), plan.get("draw", trial.number), param_name)
        if sizes is not None:
            proposal = self._first(study, _without(trial.params, self._name), sizes, self._history(study, trial), rng)
            study._storage.set_trial_system_attr(trial._trial_id, PLAN_ATTR, {**plan, **_bounds_of(proposal)})
            return proposal.micro_batch
        if param_name == self._name:
            self._refuse(
                f"the micro-batch {param_name!r} is {_kind_of(param_distribution)}; it must be whole numbers: "
                f"trial.suggest_int({param_name!r}, 1, 1024, log=True)"
            )
        if not isinstance(param_distribution, CategoricalDistribution):
            uniform = RandomSampler(seed=rng.getrandbits(32))
            return uniform.sample_independent(study, trial, param_name, param_distribution)
        history = self._history(study, trial)
        return draw_choice(
            rng,
            param_name,
            param_distribution,
            params=trial.params,
            lineages=[lineage for lineage in history.lineages.values() if lineage.complete],
            hopeless=self._hopeless(study, history),
        )

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Raise if trials have no micro-batch, which leaves nothing to bisect."""
        super().after_trial(study, trial, state, values)
        measured = state == TrialState.COMPLETE and PURPOSE not in trial.user_attrs  # the baseline may lie outside
        if measured and self._name not in trial.params:
            others = ", ".join(trial.params) or "none"
            self._refuse(
                f"trial {trial.number} has no integer parameter {self._name!r}, only {others}: give the "
                "name of the one that is the micro-batch, such as micro_batch='batch_size'"
            )

    def _refuse(self, why: str) -> None:
        """Raise ``ValueError`` for a study that cannot be searched."""
        raise ValueError(f"{type(self).__name__} cannot search this study: {why}")

    def reseed_rng(self) -> None:
        """Do nothing: draws depend on the trial's number, so workers do not repeat each other's draws."""

    def _plan(
        self, study: Study, trial: FrozenTrial, history: StudyHistory, fixed: Mapping[str, Any]
    ) -> dict[str, Any]:
        number = _draw_number(trial, history)
        rng = generator(self._study_seed(study), number, self._name)
        for lineage in self._ready(study, history, fixed):
            if lineage.distribution is None:
                continue
            proposal = self._next(study, lineage, lineage.distribution, history=history, rng=rng)
            if proposal is not None:
                reason = f"continues these knobs: micro-batch from {proposal.low} to {proposal.high}"
                return {"draw": number, "lineage": dict(lineage.params), **_bounds_of(proposal), "reason": reason}
        if self._planner is None:
            return {"draw": number, "reason": _AT_RANDOM}
        drawn = self._planner.draw(history.trials, rng, fixed=fixed, hopeless=self._hopeless(study, history))
        if drawn is None:
            return {"draw": number, "reason": _AT_RANDOM}
        params, size = drawn
        distribution = self._planner.problem.micro_batches
        first = _up_to(distribution, self._failures(history).largest_first(params))
        size = unused_micro_batches(first.low, max(first.low, size), first)[-1]
        high = max(size, self._ceiling(params, history.trials, distribution))
        return {
            "draw": number,
            "lineage": dict(params),
            "micro_batch": size,
            "low": distribution.low,
            "high": high,
            "reason": "drawn by its chance to be the best",
        }

    def _ready(self, study: Study, history: StudyHistory, fixed: Mapping[str, Any]) -> Iterator[Lineage]:
        """Yield the lineages that another trial may continue, most urgent, or with ranks that wait, first."""
        pruner = study.pruner
        lineages = history.lineages
        if isinstance(pruner, LineageGate):
            keys = pruner.continuable(study, lineages)
        else:
            waiting = waiting_launch(history.trials)
            keys = sorted(lineages, key=lambda key: waiting not in set(map(root_launch, lineages[key].trials)))
        unreachable = history.unreachable
        for key in keys:
            lineage = lineages[key]
            free = lineage.complete and not lineage.running and not lineage.broken and key not in unreachable
            if free and agrees(lineage.params, fixed):
                yield lineage

    def _taken(self, planned: Mapping[str, Any], trial: FrozenTrial, others: StudyHistory) -> bool:
        """Return whether an earlier running trial plans the same lineage."""
        earlier = [t for t in others.pending if t.number < trial.number]
        return lineage_key(planned, micro_batch=self._name) in group(earlier, micro_batch=self._name)

    def _follows(self, trial: FrozenTrial, plan: Mapping[str, Any]) -> bool:
        """Return whether a trial has its planned knobs."""
        if "lineage" not in plan:
            return False
        planned = lineage_key(plan["lineage"], micro_batch=self._name)
        return planned == lineage_key(_without(trial.params, self._name))

    def _first(
        self,
        study: Study,
        params: Mapping[str, Any],
        distribution: IntDistribution,
        history: StudyHistory,
        rng: random.Random,
    ) -> Proposal:
        """Return the micro-batch of given knobs, which need not be a new lineage."""
        key = lineage_key(params)
        empty = Lineage(key=key, params=params, trials=(), micro_batch=self._name)
        lineage = history.lineages.get(key, empty)
        distribution = _up_to(distribution, self._failures(history).largest_first(params))
        proposal = self._next(study, lineage, distribution, history=history, rng=rng)
        return proposal or self._leftover(lineage, distribution, history)

    def _next(
        self,
        study: Study,
        lineage: Lineage,
        distribution: IntDistribution,
        *,
        history: StudyHistory,
        rng: random.Random,
    ) -> Proposal | None:
        """Return the next micro-batch of a lineage worth a launch, None if the lineage is finished (``_propose``)."""
        proposal = self._propose(study, lineage, distribution, history=history, rng=rng)
        if proposal is None:
            return None
        top = self._top(lineage.params, history.trials, distribution)
        if proposal.micro_batch <= top:
            return proposal
        low = max(distribution.low, (lineage.largest_fit or 0) + 1)
        left = unused_micro_batches(low, top, distribution, used=lineage.used)
        return replace(proposal, micro_batch=left[-1]) if left else None

    def _top(self, params: Mapping[str, Any], history: Sequence[FrozenTrial], distribution: IntDistribution) -> int:
        """Return the largest micro-batch of some knobs worth a launch, whether or not it fits."""
        largest = None if self._planner is None else self._planner.largest_worth(history, params)
        return distribution.high if largest is None else min(distribution.high, largest)

    def _leftover(self, lineage: Lineage, distribution: IntDistribution, history: StudyHistory) -> Proposal:
        """Return an unused micro-batch of a finished lineage, or any that may be launched if all were used."""
        top = self._ceiling(lineage.params, history.trials, distribution)
        if lineage.smallest_too_large is not None:
            top = min(top, lineage.smallest_too_large - 1)
        top = max(distribution.low, min(top, self._top(lineage.params, history.trials, distribution)))
        unused = unused_micro_batches(distribution.low, top, distribution, used=lineage.used)
        size = middle(unused or unused_micro_batches(distribution.low, top, distribution))
        return Proposal(micro_batch=size, low=distribution.low, high=top)

    def _ceiling(self, params: Mapping[str, Any], history: Sequence[FrozenTrial], distribution: IntDistribution) -> int:
        """Return the largest micro-batch expected to fit, within the distribution."""
        largest = None if self._planner is None else self._planner.largest_fit(history, params)
        if largest is None:
            largest = distribution.high
        return int(min(distribution.high, max(distribution.low, self._factor * largest)))

    def _failures(self, history: StudyHistory) -> StructureFailures:
        """Return the evidence from failed launches against structures."""
        return structure_failures(history.finished, micro_batch=self._name)

    def _hopeless(self, study: Study, history: StudyHistory) -> Sequence[Mapping[str, Any]]:
        """Return the structures that fail, or that cannot win according to the study's pruner."""
        pruner, failing = study.pruner, self._failures(history).avoided
        return [*failing, *(pruner.hopeless(study, history.lineages) if isinstance(pruner, LineageGate) else ())]

    def _likely(self, lineage: Lineage, low: int, high: int) -> int:
        """Return the lower end of the interval to try, raised to its upper half while the memory model is trusted.

        The model is rarely wrong by a factor of two. It is trusted until a micro-batch of the upper half has fitted, or
        two were too large.
        """
        if self._planner is None or lineage.feasibilities.count(Feasibility.TOO_LARGE) > 1:
            return low
        return max(low, high // 2 + 1)

    def _study_seed(self, study: Study) -> int:
        if self._seed is not None:
            return self._seed
        stored = study._storage.get_study_system_attrs(study._study_id).get(_SEED_ATTR)
        if stored is None:
            study._storage.set_study_system_attr(study._study_id, _SEED_ATTR, secrets.randbits(32))
            stored = study._storage.get_study_system_attrs(study._study_id)[_SEED_ATTR]
        return int(stored)

    def _history(self, study: Study, trial: FrozenTrial) -> StudyHistory:
        return read_history(study, micro_batch=self._name, without=trial.number)


def _without(params: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in params.items() if other != name}


def _up_to(distribution: IntDistribution, most: int | None) -> IntDistribution:
    """Return the micro-batches of a distribution up to ``most``; all without a limit, or if all exceed it."""
    if most is None or most < distribution.low:
        return distribution
    if isinstance(distribution, MicroBatchSet):
        return MicroBatchSet(size for size in distribution.values if size <= most)
    high = min(most, distribution.high)
    return IntDistribution(distribution.low, high, log=distribution.log, step=distribution.step)


def _draw_number(trial: FrozenTrial, history: StudyHistory) -> int:
    """Return the number that seeds draws: the trial's number minus the number of earlier retries of lost trials."""
    number = int(trial.system_attrs.get(RETRY_ATTR, trial.number))
    return number - history.retries_before(number)


def _bounds_of(proposal: Proposal) -> dict[str, int]:
    return {"micro_batch": proposal.micro_batch, "low": proposal.low, "high": proposal.high}


def _kind_of(distribution: BaseDistribution) -> str:
    """Describe the values of a parameter."""
    if isinstance(distribution, CategoricalDistribution):
        return f"one of {', '.join(map(repr, distribution.choices))}"
    return "a float" if isinstance(distribution, FloatDistribution) else type(distribution).__name__


def _holds(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except (ValueError, TypeError):
        return False  # a value of another space


def generator(*parts: object) -> random.Random:
    """Return a random generator seeded by the parts only, reproducible on every machine."""
    digest = hashlib.sha256("\x1f".join(map(repr, parts)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def draw_choice(
    rng: random.Random,
    name: str,
    distribution: CategoricalDistribution,
    *,
    params: Mapping[str, Any],
    lineages: Iterable[Lineage],
    hopeless: Sequence[Mapping[str, Any]],
) -> Any:
    """Return a random choice of a knob among lineages not opened before, hopeless structures last."""
    known, choices = list(lineages), distribution.choices
    for avoided in (hopeless, ()):
        left = [choice for choice in choices if not all_opened({**params, name: choice}, known, avoided)]
        if left:
            return rng.choice(left)
    return rng.choice(choices)
