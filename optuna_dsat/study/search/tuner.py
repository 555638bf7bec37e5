"""The search loop: ask for trials, launch them, report their steps, prune, retry, finish.

All decisions are functions of the study's history, so any process can continue any study. The loop is single-threaded;
launches run concurrently because the launcher only reports their progress.
"""

from __future__ import annotations

import time
from collections import Counter

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import NopPruner
from optuna.trial import TrialState

from optuna_dsat.errors import NothingRunnableError
from optuna_dsat.launch.follow import MOST_KILLED
from optuna_dsat.launch.measurement import GlobalStep, is_certain
from optuna_dsat.launch.protocol import Finished, LaunchUpdate, Observed, Settled
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.files import shortened
from optuna_dsat.study.context import SearchContext
from optuna_dsat.study.end_reason import EndReason
from optuna_dsat.study.progress import uninterrupted
from optuna_dsat.study.search.proposals import Proposals, Refusal, simplification_waits
from optuna_dsat.study.search.recorder import TrialRecorder
from optuna_dsat.study.search.running import Flight, Flights, frozen
from optuna_dsat.trials import attributes
from optuna_dsat.words import outcome_in_words, outcomes_in_words

_POLL_S = 0.5
"""Longest wait for updates of running launches, and pause between two looks at other workers' trials, in seconds."""

_STEP_TOLERANCE = 0.01
"""A trial ends once the relative error of its step time is below this."""

_REPORTS = 50
"""Counted steps of which each is reported; of n more, every ``n // 50``-th is, as each report reads all before it."""

_EXIT_WAIT_S = 5.0
"""Longest wait for exiting processes at the end of a search, in seconds."""

_SHARE_AT_USER_BATCH = 5
"""One launch in as many is kept for the search at the user's global batch (``--batch both``)."""

_FAILURE_CHARS = 300
"""Most characters of a script's own words in the message of a search that measured nothing."""

_TIMED_OUT = "the search ran out of time (--timeout)"

_AT_ONCE = (EndReason.TIMEOUT, EndReason.STOPPED)
"""Reasons that also end the search at the user's global batch."""


class Tuner:
    """Searches a study until its budget is spent, continuing from its history."""

    def __init__(self, context: SearchContext) -> None:
        self._spec = context.spec
        self._study = context.study
        self._store = context.store
        self._launcher = context.launcher
        self._context = context
        self._recorder = TrialRecorder(context)
        self._flights = Flights(context)
        self._proposals = Proposals(context, recorder=self._recorder)
        self._retried: optuna.Trial | None = None
        """The trial whose launch has ended and is about to be repeated."""
        self._over = False
        """Whether the method has proposed its last trial, so that only enqueued trials are launched."""
        timeout_s = context.spec.timeout
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def run(self) -> EndReason:
        """Search until the budget, ``--early-stopping``, ``--timeout`` or the space is exhausted; return which.

        Raises:
            ScriptFailedError: If launch after launch ends with the same error of the script.
            NothingRunnableError: If the search ended and nothing was measured.
            DeviceError: If others hold the devices for too long; trials that wait for them are returned to the study.
            StorageError: If the database failed for longer than the store's retries last.
        """
        self._store.reclaim_stale(self._study)
        self._recorder.announce_search(total_slots=self._launcher.total_slots)
        try:
            reason = self._search()
            if self._spec.confirm and reason not in _AT_ONCE and self._proposals.enqueue_simplification():
                self._context.say("Launching the best configuration without the settings that may have no effect.")
                self._loop()
            self._wait_for_exits()
        except KeyboardInterrupt:
            reason = EndReason.INTERRUPTED
        finally:
            self._return_running()
        self._recorder.call_back()  # for trials that finished as the search was interrupted
        if reason is not EndReason.INTERRUPTED:
            self._check_something_ran(reason)
        return reason

    def _search(self) -> EndReason:
        """Search, then with ``--batch both`` at the user's global batch; return why the search ended."""
        planner = self._context.method.at_user_batch
        if planner is None:
            return self._loop()
        kept = self._spec.max_trials // _SHARE_AT_USER_BATCH
        if not kept and self._context.space.has_batch_above(planner.problem.space.asked_samples_per_rank):
            self._context.say(
                f"No trial is reserved for configs at your global batch: --max-trials {_SHARE_AT_USER_BATCH} or more "
                "reserves a fifth."
            )
        self._proposals.most = self._spec.max_trials - kept
        reason = self._loop()
        self._over, self._proposals.most = True, self._spec.max_trials
        if reason not in _AT_ONCE and self._proposals.enqueue_at_user_batch():
            self._context.say("Searching at the global batch of your config.")
            while self._proposals.enqueue_at_user_batch() and self._loop() not in _AT_ONCE:
                pass
        return reason

    def _loop(self) -> EndReason:
        timed_out = False
        while True:
            # Decided anew each time: another worker's trial may be lost, and is then run here.
            reason = EndReason.TIMEOUT if timed_out else self._fill()
            if not self._flights.running:
                if reason is not None and (timed_out or not self._any_running()):
                    return reason
                time.sleep(_POLL_S)
            self._flights.watch_slots(ending=reason is not None)
            for update in self._launcher.poll(_POLL_S if self._flights.running else 0.0):
                self._handle(update)
            self._recorder.call_back()
            self._flights.start_waiting()
            if not timed_out and self._deadline is not None and time.monotonic() > self._deadline:
                timed_out = True
                self._flights.stop_all(reason=_TIMED_OUT)

    def _any_running(self) -> bool:
        """Whether trials run, here or elsewhere: the study is not over before they are."""
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    def _fill(self) -> EndReason | None:
        """Launch trials until no slot is free; return why the search ends, None if it does not."""
        if self._flights.may_start():
            self._store.reclaim_stale(self._study)
        while self._flights.may_start():
            if (reason := self._end_reason()) is not None:
                # Launches in flight may still open new configurations, for this worker or another.
                return None if reason is EndReason.EXHAUSTED and self._flights.running else reason
            trial = self._proposals.ask()
            if trial is None:
                return None  # the trials under consideration may use up the budget, or be given back
            flight = self._proposals.consider(trial)
            if isinstance(flight, Flight):
                self._flights.start(flight)
                self._proposals.in_hand = None
            elif flight is not Refusal.VETOED and self._any_running():
                return None  # running trials, here or elsewhere, may open new configurations
        return None

    def _end_reason(self) -> EndReason | None:
        """Return why no further trial is asked for; None if one is."""
        trials = self._context.trials()
        if self._study._stop_flag:
            return EndReason.STOPPED
        if simplification_waits(trials):
            return None
        if attributes.launches_used(trials) >= self._proposals.most:
            return EndReason.BUDGET
        if self._over:
            return None if any(trial.state is TrialState.WAITING for trial in trials) else EndReason.EXHAUSTED
        limit = self._spec.options.early_stopping
        if limit is not None and attributes.launches_since_best(trials, maximize=self._spec.maximize) >= limit:
            return EndReason.EARLY_STOPPING
        return EndReason.EXHAUSTED if self._proposals.exhausted() else None

    def _handle(self, update: LaunchUpdate) -> None:
        if isinstance(update, Finished) and (exited := self._flights.exited(update.launch_id)) is not None:
            self._recorder.record(exited, update.report)
            return
        flight = self._flights.find(update.launch_id)
        if flight is None or not isinstance(update, Observed | Settled | Finished):
            return
        try:
            if isinstance(update, Observed):
                step = flight.record.add(update.event)
                self._context.show_phase(update.event, flight.trial.number)
                if step is not None:
                    self._report(flight, step)
            else:
                self._finish(flight, update)
        except UpdateFinishedTrialError:
            self._flights.land(update.launch_id, exiting=False)
            self._launcher.stop(update.launch_id, outcome=Outcome.LOST, message="given to another worker")
            self._recorder.drop(flight.trial)

    def _report(self, flight: Flight, step: GlobalStep) -> None:
        """Report a counted step, and end the launch if it is pruned or its step time is known."""
        self._context.show_step(step, flight.trial.number, peak_bytes=flight.record.peak_bytes)
        counted = step.step - flight.request.start_profile_step + 1
        is_last = step.step >= flight.request.end_profile_step
        if counted < 1 or (counted % max(1, counted // _REPORTS) and not is_last):
            return
        metrics = self._recorder.metrics(flight)
        if step.step not in flight.reported:
            flight.reported.add(step.step)
            flight.trial.report(metrics[self._context.metric], step.step)
        if flight.is_user_config or is_last:
            return  # everything is compared with the user's config, so it is measured to its end
        launch_id = flight.request.launch_id
        if flight.may_be_pruned and self._prunes(flight.trial):
            message = f"stopped at step {step.step}: it cannot be among the best at {self._recorder.in_words(metrics)}"
            self._launcher.stop(launch_id, message=message)
        elif is_certain(flight.record.counted, tolerance=_STEP_TOLERANCE):
            message = f"measured to step {step.step}: the step time is known"
            self._launcher.stop(launch_id, outcome=Outcome.MEASURED, message=message)

    def _prunes(self, trial: optuna.Trial) -> bool:
        """Whether the pruner stops a trial; without one, nothing is read, as reading takes as long as a short step."""
        pruner = self._study.pruner
        return not isinstance(pruner, NopPruner) and pruner.prune(self._study, frozen(self._study, trial))

    def _finish(self, flight: Flight, update: Settled | Finished) -> None:
        """Retry the launch, or finish its trial."""
        report = update.report
        with uninterrupted():
            self._flights.land(update.launch_id, exiting=isinstance(update, Settled))
            self._recorder.record(flight, report)
            self._recorder.record_steps(flight)
            most = max(self._spec.max_retries, MOST_KILLED if report.outcome is Outcome.KILLED else 0)
            if not (report.afresh or (report.outcome.retryable and flight.attempt < most)):
                self._recorder.tell(flight, report)
                return
            if not self._store.heartbeat.is_own(self._context.study_uuid, flight.trial.number):
                self._recorder.drop(flight.trial)
                return
            self._retried = flight.trial
        why = "not measured in a running engine" if report.afresh else outcome_in_words(report.outcome)
        self._context.say(f"Trial {flight.trial.number}: {why}, launched again.")
        self._flights.start(flight.retry())
        self._retried = None

    def _wait_for_exits(self) -> None:
        """Wait up to ``_EXIT_WAIT_S`` for exiting processes, so that the time they take is recorded."""
        deadline = time.monotonic() + _EXIT_WAIT_S
        while self._flights.exiting and time.monotonic() < deadline:
            for update in self._launcher.poll(_POLL_S):
                self._handle(update)

    def _return_running(self) -> None:
        """Return running trials to the study; a resumed study runs them again."""
        reason = "the search was stopped"
        numbers = self._flights.return_all(reason=reason)
        for trial in (self._retried, self._proposals.in_hand):  # stopped between two steps of theirs
            if trial is not None and trial.number not in numbers:
                numbers += [trial.number] if self._store.return_trial(self._study, trial, reason=reason) else []
        if numbers:
            listed = ", ".join(map(str, numbers))
            self._context.say(f"Returned to the study, to run again after a resume: trial {listed}.")

    def _check_something_ran(self, reason: EndReason) -> None:
        trials = self._context.trials()
        if attributes.best_trials(trials, maximize=self._spec.maximize):
            return
        outcomes = Counter(t.user_attrs[attributes.OUTCOME] for t in trials if attributes.OUTCOME in t.user_attrs)
        counts = outcomes_in_words(outcomes)
        ended = "none is left that may run" if reason is EndReason.EXHAUSTED else reason
        raise NothingRunnableError(
            f"No configuration could be measured ({counts or 'nothing was launched'}). The search ended: {ended}. "
            f"{self._commonest_failure()}The logs lie in {self._spec.study_dir}."
        )

    def _commonest_failure(self) -> str:
        """Return a sentence on what most launches of trials died of, the last of equals; empty for none."""
        launches = self._store.launches(self._context.study_uuid)
        failed = [row.report for row in reversed(launches) if row.purpose == "trial" and row.report.failed]
        commonest = Counter(report.failure_in_words for report in failed).most_common(1)
        return f"The commonest failure: {shortened(commonest[0][0], _FAILURE_CHARS)}. " if commonest else ""
