"""Sampler and pruner of each search method, and the largest micro-batch worth trying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial

from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.prior_knowledge import PriorKnowledge
from optuna_dsat.guided.problem import Problem
from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, GuidedSampler, LineageRandomSampler
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.space import hardware_of, objective, user_samples_per_rank
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes

_UNKNOWN_SD = 1.0
"""Standard deviation of a log objective that the search does not estimate."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A search method: an Optuna sampler and the pruner it works with."""

    sampler: LineageRandomSampler | BinarySearchSampler
    pruner: BasePruner
    planner: GuidedPlanner
    """Knows the space, and predicts peaks."""
    posterior: GuidedPlanner | None = None
    """Estimates the metric of measured trials; None if the method compares measurements."""
    at_user_batch: GuidedPlanner | None = None
    """Plans the trials at the user's global batch; None without ``--batch both``."""

    def ranked(self, trials: Sequence[FrozenTrial], *, maximize: bool) -> list[FrozenTrial]:
        """Return the measured trials, best first: by posterior mean if the method has a posterior."""
        best = attributes.best_trials(trials, maximize=maximize)
        if self.posterior is None or not best:
            return best
        values = self.posterior.posterior_means(trials)
        sign = -1 if maximize else 1
        return sorted(best, key=lambda trial: sign * values.get(trial.number, trial.values[0]))

    def estimate(
        self, trials: Sequence[FrozenTrial], numbers: Sequence[int], *, maximize: bool
    ) -> JointEstimate | None:
        """Return the search's estimate of measured trials; None if the method has no posterior.

        Of trials that its model does not cover next to nothing is known.
        """
        if self.posterior is None:
            return None
        known, mean, covariance = self.posterior.joint_posterior(trials, numbers)
        values = {trial.number: trial.values[0] for trial in attributes.best_trials(trials, maximize=maximize)}
        means = np.log([values[number] for number in numbers]) * (1 if maximize else -1)
        joint = np.diag(np.full(len(numbers), _UNKNOWN_SD**2))
        places = np.array([list(numbers).index(number) for number in known], dtype=np.int64)
        means[places], joint[np.ix_(places, places)] = mean, covariance
        return JointEstimate(
            numbers=tuple(numbers), means=tuple(means.tolist()), covariance=tuple(map(tuple, joint.tolist()))
        )

    def noise(self, trials: Sequence[FrozenTrial]) -> float | None:
        """Return the relative standard deviation between launches; None if the method does not estimate it."""
        return None if self.posterior is None else self.posterior.noise(trials)

    def predicted_peak(
        self, trials: Sequence[FrozenTrial], params: Mapping[str, Any], config: Mapping[str, Any]
    ) -> int:
        """Return the peak of a rank in bytes that the method expects.

        ``params`` are the knobs of the configuration; empty if it is outside the search space.
        """
        return self.planner.expected_peak([trial for trial in trials if trial.state.is_finished()], params, config)

    def exhausted(self, study: optuna.Study) -> bool:
        """Whether nothing is left that may win."""
        return self.sampler.exhausted(study, classes=len(self.planner.problem.table.lineages))

    def veto(self, study: optuna.Study, trial: FrozenTrial) -> str | None:
        """Return why a trial should not be launched; None if it should."""
        if isinstance(self.pruner, AshaPruner | DeepSpeedPruner):
            return self.pruner.reason(study, trial)
        return "held back by the pruner" if self.pruner.prune(study, trial) else None


def make_planner(
    spec: StudySpec, profiled: Profiled, space: SearchSpace, *, prior_knowledge: PriorKnowledge | None = None
) -> GuidedPlanner:
    """Return the planner of a guided search over a study's space."""
    return GuidedPlanner(
        Problem(
            profile=profiled.profile,
            hardware=hardware_of(spec, profiled),
            data_parallel_size=profiled.data_parallel_size,
            config=spec.ds_config,
            space=space,
            metric=objective(spec, profiled),
            memory_margin=spec.options.memory_margin,
            profile_steps=spec.end_profile_step,
            start_s=profiled.start_s,
            prior_knowledge=prior_knowledge,
        ),
        min_gain=spec.options.min_gain,
    )


def make_method(
    spec: StudySpec, profiled: Profiled, space: SearchSpace, *, prior_knowledge: PriorKnowledge | None = None
) -> Method:
    """Return the sampler and pruner of ``spec.method``."""
    options, name = spec.options, spec.method
    samples = user_samples_per_rank(spec, profiled) if spec.batch == "both" else None
    same_batch = None if samples is None else space.at_batch(samples)
    planner = make_planner(spec, profiled, space, prior_knowledge=prior_knowledge if name == "guided" else None)
    sampler: LineageRandomSampler | BinarySearchSampler
    pruner: BasePruner = optuna.pruners.NopPruner()
    if name == "random":
        limit = options.trials_per_random_config
        sampler = LineageRandomSampler(trials_per_random_config=limit, planner=planner, seed=spec.random_seed)
        pruner = DeepSpeedPruner(trials_per_random_config=limit)
    elif name == "guided":
        sampler = GuidedSampler(planner=planner, seed=spec.random_seed)
    else:
        sampler = BinarySearchSampler(
            search_range_factor=options.search_range_factor, planner=planner, seed=spec.random_seed
        )
        if name == "asha":
            pruner = AshaPruner(
                max_rungs=options.max_rungs,
                min_binary_search_trials=options.min_binary_search_trials,
                divisor=options.divisor,
                asha_early_stopping=options.asha_early_stopping,
            )
    return Method(
        sampler=sampler,
        pruner=pruner,
        planner=planner,
        posterior=planner if name == "guided" else None,
        at_user_batch=None if same_batch is None else make_planner(spec, profiled, same_batch),
    )
