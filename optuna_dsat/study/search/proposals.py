"""From the sampler's parameters to a launch: which configurations are launched, and which are rejected before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import BF16, NVME
from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.config.knobs import CHECKPOINT_EVERY, COMPILE, DEEPCOMPILE
from optuna_dsat.study.context import SearchContext
from optuna_dsat.study.profile.script import user_config
from optuna_dsat.study.progress import uninterrupted
from optuna_dsat.study.requests import launch_request
from optuna_dsat.study.search.recorder import TrialRecorder
from optuna_dsat.study.search.running import Flight, frozen
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import FIXED_ATTR, PLAN_ATTR, STRUCTURE
from optuna_dsat.words import config_in_words

_MAX_REFUSALS = 200
"""Consecutive refused trials after which the search space counts as exhausted."""


class Refusal(Enum):
    """Why a trial is not launched."""

    DUPLICATE = "duplicate"
    """Its configuration was launched before, here or by another worker."""
    VETOED = "vetoed"
    """The method's pruner rules it out."""
    LOST = "lost"
    """It was given to another worker."""


class Proposals:
    """Asks a study for trials and turns them into launches."""

    def __init__(self, context: SearchContext, *, recorder: TrialRecorder) -> None:
        self._context = context
        self._store = context.store
        self._study = context.study
        self._space = context.space
        self._profiled = context.profiled
        self._method = context.method
        self._recorder = recorder
        self._own = user_config(context.spec, data_parallel_size=context.profiled.data_parallel_size)
        """The user's config with explicit batch sizes, and its overlay."""
        self._refused = 0
        """Consecutive refused trials."""
        self.most = context.spec.max_trials
        """Number of launches at which the search, or the part of it that runs, ends."""
        self.in_hand: optuna.Trial | None = None
        """The trial that was asked for last; it may neither be launched nor refused yet."""

    def exhausted(self) -> bool:
        """Whether no remaining configuration can win and none is enqueued."""
        if self._refused >= _MAX_REFUSALS:
            return True
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return not waiting and self._method.exhausted(self._study)

    def ask(self) -> optuna.Trial | None:
        """Ask for a trial, one worker at a time; None if trials under consideration may use up the budget."""
        asked: list[optuna.Trial] = []

        def work() -> optuna.Trial | None:
            if not asked:
                if not self._within_budget():
                    return None
                self.in_hand = self._study.ask()
                asked.append(self.in_hand)
            # Under the lock: a running trial without a sign of life is nobody's.
            self._store.heartbeat.add(self._context.study_uuid, asked[0].number)
            return asked[0]

        with uninterrupted():
            return self._store.exclusively("ask for a trial", work)

    def _within_budget(self) -> bool:
        """Whether another launch is within the budget even if all trials under consideration are launched."""
        trials = self._study.get_trials(deepcopy=False)
        if simplification_waits(trials):
            return True
        considered = sum(t.state is TrialState.RUNNING and attributes.LAUNCH_ID not in t.user_attrs for t in trials)
        return attributes.launches_used(trials) + considered < self.most

    def enqueue_at_user_batch(self) -> bool:
        """Enqueue the configuration at the user's global batch most worth a launch; return whether it was."""
        planner = self._method.at_user_batch

        def work() -> bool:
            trials = self._study.get_trials(deepcopy=False)
            if planner is None or attributes.launches_used(trials) >= self.most:
                return False
            if any(trial.state is TrialState.WAITING for trial in trials):
                return True
            candidate = planner.next(trials)
            if candidate is None:
                return False
            size = candidate.micro_batch
            params = {**candidate.params, MICRO_BATCH: size}
            steps = planner.problem.space.accumulation(size)
            if steps != self._space.accumulation(size):
                params[ds_config.GRADIENT_ACCUMULATION] = steps
            attrs = {attributes.SAME_BATCH: candidate.reason, attributes.PREDICTED_VALUE: candidate.value}
            self._study.enqueue_trial(params, user_attrs=attrs)
            return True

        return self._store.exclusively("enqueue a configuration at the user's batch", work)

    def enqueue_simplification(self) -> bool:
        """Enqueue the best configuration with the user's or default settings, once; return whether it was.

        Only its ZeRO stage, offloads and micro-batch stay: methods draw the other settings for every trial, so that the
        best trial may have some that have no effect. There is nothing to enqueue if it is the user's config or this has
        been launched, nor if the last trial was enqueued so: a call after the end of a study launches nothing.
        """

        def work() -> bool:
            trials = self._study.get_trials(deepcopy=False)
            ranked = self._method.ranked(trials, maximize=self._context.spec.maximize)
            if not ranked or attributes.PURPOSE in ranked[0].user_attrs:
                return False
            best = ranked[0]
            launched = [trial for trial in trials if attributes.LAUNCH_ID in trial.user_attrs]
            if any(trial.user_attrs.get(attributes.SIMPLIFIES) == best.number for trial in trials):
                return False
            if any(attributes.SIMPLIFIES in trial.user_attrs for trial in launched[-1:]):
                return False
            kept = (*STRUCTURE, NVME, CHECKPOINT_EVERY, COMPILE, DEEPCOMPILE, BF16)
            params = self._space.completed({name: best.params.get(name) for name in kept})
            for name in (MICRO_BATCH, ds_config.GRADIENT_ACCUMULATION):
                if name in best.params:
                    params[name] = best.params[name]
            if any(trial.params == params for trial in launched):
                return False
            self._study.enqueue_trial(params, user_attrs={attributes.SIMPLIFIES: best.number})
            return True

        return self._store.exclusively("enqueue a simpler configuration", work)

    def consider(self, trial: optuna.Trial) -> Flight | Refusal:
        """Return the launch of a trial, or finish the trial and return why it is not launched."""
        try:
            return self._flight_or_refusal(trial)
        except UpdateFinishedTrialError:
            self._store.release_trial(self._context.study_uuid, trial.number)
            self._recorder.drop(trial)
            return Refusal.LOST

    def _flight_or_refusal(self, trial: optuna.Trial) -> Flight | Refusal:
        config, overlay = self._configuration(trial)
        key = ds_config.canonical_key(config, params_count=self._profiled.profile.params)
        if not self._store.claim(self._context.study_uuid, key, trial.number):
            self._refuse(trial, Refusal.DUPLICATE.value)
            return Refusal.DUPLICATE
        asked = frozen(self._study, trial)
        veto = None if attributes.SAME_BATCH in asked.user_attrs else self._method.veto(self._study, asked)
        if veto is not None:
            self._store.release_claim(self._context.study_uuid, key)
            self._refuse(trial, veto)
            return Refusal.VETOED
        self._refused = 0
        launch_id = f"trial-{trial.number:04d}"
        request = launch_request(
            self._context.spec,
            launch_id=launch_id,
            purpose="trial",
            overlay=overlay,
            config=config,
            profiled=self._profiled,
        )
        words = config_in_words(config, user=self._own[0], params_count=self._profiled.profile.params)
        reason, trials = _reason(asked), self._study.get_trials(deepcopy=False)
        facts = {
            attributes.CONFIG: dict(config),
            attributes.CONFIGURATION: words,
            attributes.REASON: reason,
            attributes.PREDICTED_VALUE: (asked.system_attrs.get(PLAN_ATTR) or {}).get("predicted"),
            attributes.OVERLAY: dict(overlay),
            attributes.CONFIG_KEY: key,
            attributes.PREDICTED_PEAK_BYTES: self._method.predicted_peak(trials, trial.params, config),
            attributes.LAUNCH_ID: launch_id,
        }
        for name, value in facts.items():
            if value is not None:
                trial.set_user_attr(name, value)
        return Flight(trial=trial, request=request, words=words, reason=reason)

    def _configuration(self, trial: optuna.Trial) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the DeepSpeed config of a trial and its overlay over the script's config."""
        if trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG:
            if self._space.params_of(self._own[0]) is not None:
                self._space.suggest(trial)
            return self._own
        params = self._space.suggest(trial)
        enqueued = frozen(self._study, trial).system_attrs.get(FIXED_ATTR) or {}
        if (steps := enqueued.get(ds_config.GRADIENT_ACCUMULATION)) is not None:
            params[ds_config.GRADIENT_ACCUMULATION] = trial.suggest_int(ds_config.GRADIENT_ACCUMULATION, 1, steps)
        overlay = self._space.overlay(params)
        return ds_config.merge(self._own[0], overlay), overlay

    def _refuse(self, trial: optuna.Trial, reason: str) -> None:
        self._refused += 1
        trial.set_user_attr(attributes.VETOED, reason)
        self._study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
        self._store.heartbeat.remove(self._context.study_uuid, trial.number)


def _reason(trial: FrozenTrial) -> str:
    """Return why a trial is launched; empty if its sampler does not say."""
    attrs = trial.user_attrs
    if attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG:
        return "your config"
    if attributes.SIMPLIFIES in attrs:
        return f"trial {attrs[attributes.SIMPLIFIES]} without settings that may have no effect"
    if attributes.SAME_BATCH in attrs:
        return f"at your global batch: {attrs[attributes.SAME_BATCH]}"
    plan = trial.system_attrs.get(PLAN_ATTR)
    if plan is None and FIXED_ATTR in trial.system_attrs:
        return "enqueued"
    return str((plan or {}).get("reason", ""))


def simplification_waits(trials: Sequence[FrozenTrial]) -> bool:
    """Return whether the trial that simplifies the best one is enqueued; no budget counts it."""
    return any(trial.state is TrialState.WAITING and attributes.SIMPLIFIES in trial.user_attrs for trial in trials)
