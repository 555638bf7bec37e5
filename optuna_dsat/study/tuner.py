"""The tuner: profile, ask, veto, launch, report, prune, tell, confirm, export.

All decisions are functions of the study's history, so any process can continue any study. One thread does everything;
launches run side by side because the launcher only reports what they do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.config import ds_config
from optuna_dsat.config.space_builder import SearchSpace
from optuna_dsat.errors import NothingRunnableError
from optuna_dsat.launch.measurement import GlobalStep, LaunchRecord, is_certain
from optuna_dsat.launch.protocol import (
    Finished,
    Launcher,
    LaunchReport,
    LaunchUpdate,
    Observed,
    Settled,
    SlotsBusyError,
)
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store
from optuna_dsat.study.launch_requests import launch_request
from optuna_dsat.study.methods import Method
from optuna_dsat.study.profile import Profiled
from optuna_dsat.study.progress import Message, Observer, TrialStarted, TrialStepped
from optuna_dsat.study.progress_summary import search_started
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.trial_recorder import Flight, TrialRecorder
from optuna_dsat.study.user_config import user_config
from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words

__all__ = ["EndReason", "Tuner"]

_REFUSALS = 200
"""Asked configurations in a row that were run before or vetoed, after which the space counts as exhausted."""

_WAIT_S = 0.5
"""Longest wait for news of the launches in flight, and pause between two looks at other workers', in seconds."""

_STEP_TOLERANCE = 0.01
"""A trial ends once its step time is known to one percent, either way."""

_SEE_OFF_S = 5.0
"""Longest wait for the last processes at the end of a search, in seconds."""


class EndReason(StrEnum):
    """Why a search ended."""

    BUDGET = "the budget of launches is spent"
    EARLY_STOPPING = "no new best for as many launches as --early-stopping allows"
    TIMEOUT = "the time of --timeout is over"
    EXHAUSTED = "nothing that is left is expected to win"
    INTERRUPTED = "interrupted"


class Tuner:
    """Runs one study until its budget is spent, from wherever its history stands.

    Args:
        spec: What to tune.
        study: The Optuna study, made with ``method``'s sampler and pruner.
        study_uuid: The study's own identifier in the store.
        space: The search space.
        profiled: What the profile launch taught.
        method: Sampler and pruner.
        store: Claims, heartbeats and launches.
        launcher: Where launches run.
        observer: Hears the news.
        wait: Says who holds the slots while nothing runs, and how long that is waited for.
    """

    def __init__(
        self,
        spec: StudySpec,
        *,
        study: optuna.Study,
        study_uuid: str,
        space: SearchSpace,
        profiled: Profiled,
        method: Method,
        store: Store,
        launcher: Launcher,
        observer: Observer,
        wait: SlotWait,
    ) -> None:
        self._wait = wait
        self._spec = spec
        self._study = study
        self._uuid = study_uuid
        self._space = space
        self._profiled = profiled
        self._method = method
        self._store = store
        self._launcher = launcher
        self._observer = observer
        self._config = ds_config.effective(spec.ds_config)
        self._maximize = spec.direction == "maximize"
        self._running: dict[str, Flight] = {}
        self._ending: dict[str, Flight] = {}
        """Trials that are told, whose launches still end."""
        self._unstarted: list[Flight] = []
        """Those of ``_running`` that wait for a slot."""
        self._refused = 0
        self._recorder = TrialRecorder(
            spec, study=study, study_uuid=study_uuid, profiled=profiled, store=store, observer=observer
        )
        self._deadline = None if spec.timeout_s is None else time.monotonic() + spec.timeout_s

    def run(self) -> EndReason:
        """Search until the budget, ``--early-stopping``, ``--timeout`` or the space is exhausted; say which.

        Raises:
            ScriptFailedError: If launch after launch ends with the same error of the script.
            NothingRunnableError: If the search ended and nothing was measured.
            DeviceError: If others hold the devices for too long; what waits for them is returned to the study.
            StorageError: If the database failed for longer than the store's patience.
        """
        self._store.reclaim_stale(self._study)
        trials = self._trials()
        self._observer(
            search_started(
                self._spec,
                trials,
                metric=self._recorder.metric,
                maximize=self._maximize,
                total_slots=self._launcher.total_slots,
            )
        )
        try:
            reason = self._loop()
            self._see_off()
        except KeyboardInterrupt:
            reason = EndReason.INTERRUPTED
        finally:
            self._return_running()
        if reason is not EndReason.INTERRUPTED:
            self._check_something_ran()
        return reason

    def _loop(self) -> EndReason:
        timed_out = False
        while True:
            # Asked anew each time: another worker's trial may be lost, and is then run here.
            reason = EndReason.TIMEOUT if timed_out else self._fill()
            if not self._running:
                if reason is not None and (timed_out or not self._any_running()):
                    return reason
                time.sleep(_WAIT_S)
            self._watch_slots(ending=reason is not None)
            for update in self._launcher.poll(_WAIT_S if self._running else 0.0):
                self._take(update)
            self._start_unstarted()
            if not timed_out and self._deadline is not None and time.monotonic() > self._deadline:
                timed_out = True
                self._end_for_time()

    def _watch_slots(self, *, ending: bool) -> None:
        """Have the wait for slots told and bounded while nothing runs for want of them.

        Raises:
            DeviceError: If others hold them for too long.
        """
        waiting = {flight.request.launch_id for flight in self._unstarted} | set(self._launcher.waiting)
        if self._ending or self._running.keys() - waiting:
            self._wait.over()
        elif waiting or (not ending and self._launcher.free_slots < self._spec.slots_per_trial):
            self._wait.look()
        else:
            self._wait.over()

    def _end_for_time(self) -> None:
        for running in self._unstarted:
            del self._running[running.request.launch_id]
            self._store.return_trial(self._study, running.trial, reason="the search ran out of time (--timeout)")
        self._unstarted.clear()
        for launch_id in self._running:
            self._launcher.stop(launch_id, message="the search ran out of time (--timeout)")

    def _any_running(self) -> bool:
        """Whether trials are in flight, here or elsewhere: the study is not over before they are."""
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    def _fill(self) -> EndReason | None:
        """Launch trials until no slot is free; return why the search ends, if it does."""
        if self._may_launch():
            self._store.reclaim_stale(self._study)
        while self._may_launch():
            trials = self._trials()
            if attributes.launches_used(trials) >= self._spec.max_trials:
                return EndReason.BUDGET
            limit = self._spec.options.early_stopping
            if limit is not None and attributes.launches_since_best(trials, maximize=self._maximize) >= limit:
                return EndReason.EARLY_STOPPING
            if self._refused >= _REFUSALS or self._method.exhausted(self._study):
                # Launches in flight may still open new ground, for this worker or another.
                return EndReason.EXHAUSTED if not self._running else None
            trial = self._next_trial()
            if trial is None or (not self._consider(trial) and self._any_running()):
                return None  # what is in flight, here or elsewhere, may open new ground or be given back
        return None

    def _next_trial(self) -> optuna.Trial | None:
        """Ask for a trial; return None where those that are being considered already may use up the budget.

        Workers ask one at a time, so that all of them together launch no more than the budget allows.
        """
        with self._store.exclusive("ask for a trial"):
            trials = self._trials()
            considered = sum(t.state is TrialState.RUNNING and attributes.LAUNCH_ID not in t.user_attrs for t in trials)
            if attributes.launches_used(trials) + considered >= self._spec.max_trials:
                return None
            trial = self._study.ask()
        self._store.heartbeat.add(trial)
        return trial

    def _may_launch(self) -> bool:
        slots = self._spec.slots_per_trial
        if self._unstarted or len(self._running) >= self._spec.max_concurrent_trials:
            return False
        if self._launcher.free_slots < slots:
            return False
        return self._spec.max_slots is None or (len(self._running) + 1) * slots <= self._spec.max_slots

    def _consider(self, trial: optuna.Trial) -> bool:
        """Launch a trial, or tell at once why it is not launched; return False for a duplicate."""
        try:
            return self._launch_or_refuse(trial)
        except UpdateFinishedTrialError:
            self._store.release_trial(self._uuid, trial.number)
            self._recorder.drop(trial)
            return False

    def _launch_or_refuse(self, trial: optuna.Trial) -> bool:
        if trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG:
            config, overlay = user_config(self._spec, data_parallel_size=self._profiled.data_parallel_size)
            if self._space.params_of(config) is not None:
                self._space.suggest(trial)
        else:
            overlay = self._space.overlay(self._space.suggest(trial))
            config = ds_config.merge(self._config, overlay)
        key = ds_config.canonical_key(config, params_count=self._profiled.profile.params)
        if not self._store.claim(self._uuid, key, trial.number):
            self._refuse(trial, "duplicate")
            return False
        why = self._method.veto(self._study, self._frozen(trial))
        if why is not None:
            self._store.release_claim(self._uuid, key)
            self._refuse(trial, why)
            return True
        self._refused = 0
        self._launch(trial, config=config, overlay=overlay, key=key)
        return True

    def _refuse(self, trial: optuna.Trial, why: str) -> None:
        self._refused += 1
        trial.set_user_attr(attributes.VETOED, why)
        self._study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
        self._store.heartbeat.remove(trial)

    def _launch(
        self,
        trial: optuna.Trial,
        *,
        config: Mapping[str, Any],
        overlay: Mapping[str, Any],
        key: str,
    ) -> None:
        request = launch_request(
            self._spec, launch_id=f"trial-{trial.number:04d}", purpose="trial", overlay=overlay, config=config
        )
        trial.set_user_attr(attributes.CONFIG, dict(config))
        trial.set_user_attr(attributes.CONFIGURATION, config_in_words(config))
        trial.set_user_attr(attributes.OVERLAY, dict(overlay))
        trial.set_user_attr(attributes.CONFIG_KEY, key)
        trial.set_user_attr(attributes.LAUNCH_ID, request.launch_id)
        self._start(
            Flight(
                trial=trial,
                request=request,
                record=self._new_record(),
                words=config_in_words(config),
            )
        )

    def _new_record(self) -> LaunchRecord:
        return LaunchRecord(world_size=self._spec.slots_per_trial, start_profile_step=self._spec.start_profile_step)

    def _start(self, running: Flight) -> None:
        self._running[running.request.launch_id] = running
        try:
            self._launcher.start(running.request)
        except SlotsBusyError:
            self._unstarted.append(running)  # another tuner on this machine was faster
            return
        self._observer(
            TrialStarted(
                number=running.trial.number,
                words=running.words,
                attempt=running.attempt,
                end_profile_step=running.request.end_profile_step,
            )
        )

    def _start_unstarted(self) -> None:
        """Try again to start the launches for which there was no slot."""
        unstarted, self._unstarted = self._unstarted, []
        for running in unstarted:
            self._start(running)

    def _take(self, update: LaunchUpdate) -> None:
        if isinstance(update, Finished) and update.launch_id in self._ending:
            self._recorder.record(self._ending.pop(update.launch_id), update.report)
            return
        running = self._running.get(update.launch_id)
        if running is None or not isinstance(update, Observed | Settled | Finished):
            return
        try:
            if isinstance(update, Observed):
                step = running.record.add(update.event)
                if step is not None:
                    self._report(running, step)
            else:
                del self._running[update.launch_id]
                if isinstance(update, Settled):
                    self._ending[update.launch_id] = running
                self._finish(running, update.report)
        except UpdateFinishedTrialError:
            self._running.pop(update.launch_id, None)
            self._launcher.stop(update.launch_id, outcome=Outcome.LOST, message="given to another worker")
            self._recorder.drop(running.trial)

    def _report(self, running: Flight, step: GlobalStep) -> None:
        """Report a step that counts and let the pruner stop a job that cannot win."""
        self._observer(
            TrialStepped(
                number=running.trial.number,
                step=step.step,
                samples_per_s=step.samples / step.latency_s,
                peak_bytes=running.record.peak_bytes,
            )
        )
        if step.step < self._spec.start_profile_step:
            return
        running.trial.report(self._recorder.metrics(running)[self._recorder.metric], step.step)
        own = running.trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG
        if own or step.step >= running.request.end_profile_step:
            return  # everything is compared with the user's own config, so that is measured to its end
        if self._study.pruner.prune(self._study, self._frozen(running.trial)):
            self._launcher.stop(
                running.request.launch_id, message=f"stopped at step {step.step}: it cannot be among the best"
            )
        elif is_certain(running.record.counted, tolerance=_STEP_TOLERANCE):
            self._launcher.stop(
                running.request.launch_id,
                outcome=Outcome.MEASURED,
                message=f"measured to step {step.step}: the step time is known",
            )

    def _finish(self, running: Flight, report: LaunchReport) -> None:
        """Retry, or tell the trial what became of it."""
        trial = running.trial
        self._recorder.record(running, report)
        self._recorder.record_steps(running)
        if report.outcome.retryable and running.attempt < self._spec.max_retries:
            attempt = running.attempt + 1
            request = replace(running.request, launch_id=f"trial-{trial.number:04d}-retry-{attempt}")
            self._observer(Message(text=f"Trial {trial.number}: {report.outcome.value}, launched again."))
            self._start(replace(running, request=request, record=self._new_record(), attempt=attempt))
            return
        self._recorder.tell(running, report)

    def _see_off(self) -> None:
        """Wait for the processes of launches that are settled, a moment at most: how long they took is recorded."""
        deadline = time.monotonic() + _SEE_OFF_S
        while self._ending and time.monotonic() < deadline:
            for update in self._launcher.poll(_WAIT_S):
                self._take(update)

    def _return_running(self) -> None:
        """Give what is still in flight back to the study, so that whoever resumes it runs it again."""
        running, self._running = list(self._running.values()), {}
        for item in running:
            self._launcher.stop(item.request.launch_id, outcome=Outcome.LOST, message="the search was stopped")
        for item in running:
            self._store.return_trial(self._study, item.trial, reason="the search was stopped")
        if running:
            numbers = ", ".join(str(item.trial.number) for item in running)
            self._observer(Message(text=f"Returned to the study, to be run again when it goes on: trial {numbers}."))

    def _check_something_ran(self) -> None:
        trials = self._trials()
        if attributes.best_trials(trials, maximize=self._maximize):
            return
        outcomes: dict[str, int] = {}
        for trial in trials:
            outcome = trial.user_attrs.get(attributes.OUTCOME)
            if outcome is not None:
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
        counts = ", ".join(f"{count} x {name}" for name, count in sorted(outcomes.items()))
        raise NothingRunnableError(
            f"No configuration could be measured ({counts or 'nothing was launched'}). "
            f"The logs lie in {self._spec.study_dir}."
        )

    def _trials(self) -> Sequence[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _frozen(self, trial: optuna.Trial) -> FrozenTrial:
        return self._study._storage.get_trial(trial._trial_id)
