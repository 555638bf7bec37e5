"""Sampler and pruner of each search method, and the largest micro-batch worth trying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.config.space_builder import SearchSpace
from optuna_dsat.cost import memory
from optuna_dsat.cost.memory_fit import CorrectionFit
from optuna_dsat.errors import UsageError
from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.prior_knowledge import PriorKnowledge
from optuna_dsat.guided.problem import REACH, Problem
from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, GuidedSampler, LineageRandomSampler
from optuna_dsat.study.profile.profile import profile_attempts
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.profile.script import user_config
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, lineage_key
from optuna_dsat.trials.lineage_cache import same_trial

__all__ = ["Ceiling", "Method", "make_method", "make_planner"]

JointPosterior: TypeAlias = Callable[
    [Sequence[FrozenTrial], Sequence[int]], tuple[list[int], npt.NDArray[Any], npt.NDArray[Any]]
]
_UNKNOWN_SD = 1.0
"""Standard deviation of a log objective that the search does not estimate."""


class Ceiling:
    """Largest micro-batch worth trying for given knobs: the memory model, corrected by measured peaks.

    A launch that ran out of data bounds the micro-batch for all knobs.

    The result depends only on the knobs and the finished trials. The fit is incremental: new trials are added, and a
    history that does not extend the previous history resets it.

    Args:
        spec: The study.
        profiled: Result of the profile launch.
        space: Turns knobs into a DeepSpeed config.
    """

    def __init__(self, spec: StudySpec, profiled: Profiled, space: SearchSpace) -> None:
        self._base = ds_config.effective(spec.ds_config)
        self._profile = profiled.profile
        self._hardware = hardware_of(spec, profiled)
        self._space = space
        self._reset()

    def _reset(self) -> None:
        self._fit = CorrectionFit(self._profile, self._hardware)
        self._fitted: dict[int, FrozenTrial] = {}
        self._data_limit: int | None = None
        self._history: Sequence[FrozenTrial] | None = None
        self._cache: tuple[memory.Correction, dict[str, int]] = (memory.Correction(), {})

    def __call__(self, params: Mapping[str, Any], trials: Sequence[FrozenTrial]) -> int:
        """Return the micro-batch; at least 1, regardless of the memory model.

        Args:
            params: Knobs.
            trials: The study's trials.
        """
        correction = self._corrected(trials)
        if self._cache[0] is not correction:
            self._cache = (correction, {})
        key = lineage_key(params)
        sizes = self._cache[1]
        if key not in sizes:
            config = ds_config.merge(self._base, self._space.overlay({**params, MICRO_BATCH: 1}))
            largest = memory.largest_micro_batch(self._profile, config, hardware=self._hardware, correction=correction)
            sizes[key] = max(1, largest)
        if self._data_limit is None or self._space.samples_per_rank is not None:
            return sizes[key]  # a fixed global batch needs the same data at every micro-batch
        return max(1, min(sizes[key], self._data_limit // self._space.gradient_accumulation_steps))

    def predicted_peak(self, trials: Sequence[FrozenTrial], config: Mapping[str, Any]) -> int:
        """Return the peak of a rank in bytes by the memory model, corrected by the study's trials."""
        return memory.estimate(
            self._profile,
            config,
            micro_batch=int(config[MICRO_BATCH]),
            hardware=self._hardware,
            correction=self._corrected(trials),
        ).device_bytes

    def _corrected(self, trials: Sequence[FrozenTrial]) -> memory.Correction:
        """Return the correction of the memory model for a history; it is updated only if the history changed."""
        if trials is not self._history:
            done = {trial.number: trial for trial in trials if trial.state.is_finished()}
            replaced = [trial for number, trial in self._fitted.items() if trial is not done.get(number)]
            if any(not same_trial(trial, done.get(trial.number)) for trial in replaced):
                self._reset()
            new = [trial for number, trial in done.items() if number not in self._fitted]
            self._fitted = done
            self._fit.add(attributes.measured_peaks(new))
            limits = [self._data_limit, attributes.data_limit(new)]
            self._data_limit = min((limit for limit in limits if limit is not None), default=None)
            self._history = trials
        return self._fit.correction()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A search method: an Optuna sampler and the pruner it works with."""

    sampler: LineageRandomSampler | BinarySearchSampler
    pruner: BasePruner
    classes: int
    """Lineages of the space."""
    ceiling: Ceiling | None = None
    """The memory model; None to predict no peaks."""
    planner: GuidedPlanner | None = None
    """Predicts peaks inside its space instead of ``ceiling``; None if the method has no planner."""
    posterior_means: Callable[[Sequence[FrozenTrial]], Mapping[int, float]] | None = None
    """Trials -> posterior mean of the metric by number of the measured trial; None if the method has no posterior."""
    joint_posterior: JointPosterior | None = None
    """Trials and numbers of measured trials -> numbers of known trials, with means and covariance of their log
    objectives; None if the method has no posterior."""
    remaining: Callable[[Sequence[FrozenTrial]], float] | None = None
    """Trials -> share of the metric by which the best of the space exceeds the best measured, with 90% probability at
    most; None if the method has no posterior."""

    def ranked(self, trials: Sequence[FrozenTrial], *, maximize: bool) -> list[FrozenTrial]:
        """Return the measured trials, best first: by posterior mean if the method has a posterior."""
        best = attributes.best_trials(trials, maximize=maximize)
        if self.posterior_means is None or not best:
            return best
        values = self.posterior_means(trials)
        sign = -1 if maximize else 1
        return sorted(best, key=lambda trial: sign * values.get(trial.number, trial.values[0]))

    def estimate(
        self, trials: Sequence[FrozenTrial], numbers: Sequence[int], *, maximize: bool
    ) -> JointEstimate | None:
        """Return the search's estimate of measured trials; None if the method has no posterior.

        Of trials that its model does not cover next to nothing is known.

        Args:
            trials: The study's trials.
            numbers: Numbers of measured trials.
            maximize: Whether a larger metric is better.
        """
        if self.joint_posterior is None:
            return None
        known, mean, covariance = self.joint_posterior(trials, numbers)
        values = {trial.number: trial.values[0] for trial in attributes.best_trials(trials, maximize=maximize)}
        means = np.log([values[number] for number in numbers]) * (1 if maximize else -1)
        joint = np.diag(np.full(len(numbers), _UNKNOWN_SD**2))
        places = np.array([list(numbers).index(number) for number in known], dtype=np.int64)
        means[places], joint[np.ix_(places, places)] = mean, covariance
        return JointEstimate(
            numbers=tuple(numbers), means=tuple(means.tolist()), covariance=tuple(map(tuple, joint.tolist()))
        )

    def predicted_peak(
        self, trials: Sequence[FrozenTrial], params: Mapping[str, Any], config: Mapping[str, Any]
    ) -> int | None:
        """Return the peak of a rank in bytes that the method expects; None if it has no memory model.

        Args:
            trials: The study's trials.
            params: Knobs of the configuration; empty if it is outside the search space.
            config: Its DeepSpeed config.
        """
        if self.ceiling is None:
            return None
        finished = [trial for trial in trials if trial.state.is_finished()]
        planned = None
        if self.planner is not None and params:
            knobs = {name: value for name, value in params.items() if name != MICRO_BATCH}
            (planned,) = self.planner.expected_peaks(finished, [(knobs, int(config[MICRO_BATCH]))])
        return self.ceiling.predicted_peak(finished, config) if planned is None else planned

    def exhausted(self, study: optuna.Study) -> bool:
        """Whether nothing is left that may win."""
        return self.sampler.exhausted(study, classes=self.classes)

    def veto(self, study: optuna.Study, trial: FrozenTrial) -> str | None:
        """Return why a trial should not be launched; None if it should."""
        if isinstance(self.pruner, AshaPruner | DeepSpeedPruner):
            return self.pruner.reason(study, trial)
        return "held back by the pruner" if self.pruner.prune(study, trial) else None


def _proven(spec: StudySpec, profiled: Profiled) -> tuple[int, ...]:
    """Return the micro-batches from which the search grows: the profile's and the user's; empty if unrestricted."""
    if spec.options.free_batch:
        return ()
    own, _ = user_config(spec, data_parallel_size=profiled.data_parallel_size)
    return next(profile_attempts(spec)).micro_batch, int(own[MICRO_BATCH])


def _random(spec: StudySpec, profiled: Profiled, space: SearchSpace) -> Method:
    ceiling = Ceiling(spec, profiled, space)
    limit = spec.options.trials_per_random_config
    return Method(
        sampler=LineageRandomSampler(
            trials_per_random_config=limit,
            max_micro_batch=ceiling,
            usual=space.usual,
            proven=_proven(spec, profiled),
            profile_steps=spec.end_profile_step,
            seed=spec.random_seed,
        ),
        pruner=DeepSpeedPruner(trials_per_random_config=limit),
        classes=space.classes(),
        ceiling=ceiling,
    )


def _bisection(spec: StudySpec, profiled: Profiled, space: SearchSpace, pruner: BasePruner) -> Method:
    ceiling = Ceiling(spec, profiled, space)
    sampler = BinarySearchSampler(
        search_range_factor=spec.options.search_range_factor,
        max_micro_batch=ceiling,
        usual=space.usual,
        proven=_proven(spec, profiled),
        profile_steps=spec.end_profile_step,
        seed=spec.random_seed,
    )
    return Method(sampler=sampler, pruner=pruner, classes=space.classes(), ceiling=ceiling)


def _binary(spec: StudySpec, profiled: Profiled, space: SearchSpace) -> Method:
    return _bisection(spec, profiled, space, optuna.pruners.NopPruner())


def _asha(spec: StudySpec, profiled: Profiled, space: SearchSpace) -> Method:
    options = spec.options
    pruner = AshaPruner(
        max_rungs=options.max_rungs,
        min_binary_search_trials=options.min_binary_search_trials,
        divisor=options.divisor,
        asha_early_stopping=options.asha_early_stopping,
    )
    return _bisection(spec, profiled, space, pruner)


def make_planner(
    spec: StudySpec, profiled: Profiled, space: SearchSpace, *, prior_knowledge: PriorKnowledge | None = None
) -> GuidedPlanner:
    """Return the planner of a guided search over a study's space.

    Args:
        spec: The study.
        profiled: Result of the profile launch.
        space: The search space.
        prior_knowledge: From earlier studies; None without any.
    """
    return GuidedPlanner(
        Problem(
            profile=profiled.profile,
            hardware=hardware_of(spec, profiled),
            config=spec.ds_config,
            space=space,
            metric=spec.metric,
            memory_margin=spec.options.memory_margin,
            profile_steps=spec.end_profile_step,
            reach=None if spec.options.free_batch else REACH,
            prior_knowledge=prior_knowledge,
        ),
        min_gain=spec.options.min_gain,
    )


def _guided(spec: StudySpec, profiled: Profiled, space: SearchSpace, prior_knowledge: PriorKnowledge | None) -> Method:
    planner = make_planner(spec, profiled, space, prior_knowledge=prior_knowledge)
    ceiling = Ceiling(spec, profiled, space)
    sampler = GuidedSampler(planner=planner, max_micro_batch=ceiling, usual=space.usual, seed=spec.random_seed)
    return Method(
        sampler=sampler,
        pruner=optuna.pruners.NopPruner(),
        classes=space.classes(),
        ceiling=ceiling,
        planner=planner,
        posterior_means=planner.posterior_means,
        joint_posterior=planner.joint_posterior,
        remaining=planner.remaining,
    )


_METHODS: Mapping[str, Callable[[StudySpec, Profiled, SearchSpace], Method]] = {
    "random": _random,
    "binary": _binary,
    "asha": _asha,
}


def make_method(
    spec: StudySpec, profiled: Profiled, space: SearchSpace, *, prior_knowledge: PriorKnowledge | None = None
) -> Method:
    """Return the sampler and pruner of ``spec.method``.

    Args:
        spec: The study.
        profiled: Result of the profile launch.
        space: The search space.
        prior_knowledge: From earlier studies; only ``guided`` uses it.

    Raises:
        UsageError: If the method does not exist.
    """
    if spec.method == "guided":
        return _guided(spec, profiled, space, prior_knowledge)
    if spec.method not in _METHODS:
        raise UsageError(f"There is no method {spec.method!r}; there are {', '.join((*_METHODS, 'guided'))}.")
    return _METHODS[spec.method](spec, profiled, space)
