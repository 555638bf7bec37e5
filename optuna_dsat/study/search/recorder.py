"""Records the trials of a search: results in study and store, progress events to the observer."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.config import ds_config
from optuna_dsat.errors import ScriptFailedError, UsageError
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.metrics import speed_up
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.confirm.finalists import confirmation_end
from optuna_dsat.study.confirm.rounds import MIN_ROUNDS, Rounds
from optuna_dsat.study.confirm.speeds import Speed, speed_of, with_efficiency
from optuna_dsat.study.confirm.verdict import verdict_of
from optuna_dsat.study.context import SearchContext
from optuna_dsat.study.progress import BestSoFar, SearchStarted, TrialDropped, TrialFinished
from optuna_dsat.study.search.running import Flight, frozen
from optuna_dsat.trials import attributes

_STATES = {
    Outcome.MEASURED: TrialState.COMPLETE,
    Outcome.OUT_OF_MEMORY: TrialState.PRUNED,
    Outcome.HOST_OUT_OF_MEMORY: TrialState.PRUNED,
    Outcome.OUT_OF_DATA: TrialState.PRUNED,
    Outcome.PRUNED: TrialState.PRUNED,
}
"""Outcome -> state of the trial; FAIL for all others."""


class TrialRecorder:
    """Finishes the trials of a study with the results of their launches."""

    def __init__(self, context: SearchContext) -> None:
        self._context = context
        self._study = context.study
        self._spec = context.spec
        self._store = context.store
        self._observer = context.observer
        self._maximize = context.spec.maximize
        self._metric = context.metric
        self._finished: deque[optuna.Trial] = deque()
        """Finished trials for which the callbacks have not been called."""

    def announce_search(self, *, total_slots: int) -> None:
        """Send ``SearchStarted`` with the state of the study."""
        spec, trials = self._spec, self._context.trials()
        slots = total_slots if spec.max_slots is None else min(total_slots, spec.max_slots)
        user = attributes.user_config_trial(trials)
        self._observer(
            SearchStarted(
                study=spec.name,
                metric=self._metric,
                max_trials=spec.max_trials,
                launched=attributes.launches_used(trials),
                side_by_side=max(1, min(spec.max_concurrent_trials, slots // spec.slots_per_trial)),
                finalists=MIN_ROUNDS * (spec.confirm + spec.enqueue_user_config) if spec.confirm else 0,
                finalist_steps=confirmation_end(spec) / spec.end_profile_step,
                timeout_s=spec.timeout,
                best=self._best_so_far(trials),
                confirmed=self._confirmed(trials),
                user_value=None if user is None else user.values[0],
                device=spec.device,
            )
        )

    def _confirmed(self, trials: Sequence[FrozenTrial]) -> BestSoFar | None:
        """Return what earlier runs of the study confirmed; None if no rounds decided."""
        verdict = verdict_of(trials, Rounds.of(self._study.user_attrs), self._spec)
        if verdict is None or not verdict.is_by_rounds:
            return None
        return self._shown(verdict.result.trial, verdict.result.metrics, verdict.result.value)

    def _shown(self, trial: FrozenTrial, metrics: Mapping[str, float], value: float) -> BestSoFar:
        words = trial.user_attrs.get(attributes.CONFIGURATION, "")
        return BestSoFar(number=trial.number, words=words, speed=self._speed(metrics, value))

    def _speed(self, metrics: Mapping[str, float], value: float) -> Speed:
        return speed_of(metrics, value, metric=self._metric, device=self._spec.device)

    def metrics(self, flight: Flight, *, power_w: float | None = None) -> dict[str, float]:
        """Return the metrics of the steps counted so far; of a launch that has ended with its power if known."""
        profile = self._context.profiled.profile
        counted = flight.record.metrics(flops_per_sample=profile.flops_per_sample)
        return with_efficiency(counted, profile=profile, config=flight.request.ds_config, power_w=power_w)

    def in_words(self, metrics: Mapping[str, float]) -> str:
        """Describe the speed of a launch with these metrics."""
        return self._speed(metrics, metrics[self._metric]).text

    def _value(self, flight: Flight, report: LaunchReport) -> float | None:
        """Return the objective value of a launch; None if it was not measured."""
        measured = report.outcome is Outcome.MEASURED and flight.record.counted
        return self.metrics(flight)[self._metric] if measured else None

    def record(self, flight: Flight, report: LaunchReport) -> None:
        """Store the report of a launch; a later call replaces it."""
        self._store.record_launch(
            self._context.study_uuid,
            report,
            trial_number=flight.trial.number,
            purpose=flight.request.purpose,
            attempt=flight.attempt,
        )

    def record_steps(self, flight: Flight) -> None:
        """Store the measured steps of a launch that is settled."""
        self._store.record_steps(self._context.study_uuid, flight.request.launch_id, flight.record.stored_events)

    def tell(self, flight: Flight, report: LaunchReport) -> None:
        """Finish a launch's trial, if still this worker's.

        Raises:
            ScriptFailedError: If the script fails with every config.
            UsageError: If its engine does not show the phase that is optimised, as that of a pipeline.
        """
        trial, value = flight.trial, self._value(flight, report)

        def finish() -> None:
            self._set_attributes(flight, report)
            state = _STATES.get(report.outcome, TrialState.FAIL)
            self._study.tell(trial, value, state=state, skip_if_finished=True)

        if not self._store.finish(self._context.study_uuid, trial, finish):
            self.drop(trial)
            return
        self._store.heartbeat.remove(self._context.study_uuid, trial.number)
        self._finished.append(trial)
        self._notify(flight, report, value)
        if value == 0:
            raise UsageError(
                f"--metric {self._metric}: the script's engine does not show this phase, as that of a pipeline. "
                "Begin another study with --metric latency."
            )
        self._raise_script_failure(flight, report)

    def call_back(self) -> None:
        """Call the callbacks for trials finished since the last call, as ``optuna.Study.optimize``; they may raise."""
        self._study._thread_local.in_optimize_loop = True  # lets callbacks call ``study.stop``
        try:
            while self._finished:
                trial = frozen(self._study, self._finished.popleft())
                for callback in self._context.callbacks:
                    callback(self._study, copy.deepcopy(trial))
        finally:
            self._study._thread_local.in_optimize_loop = False

    def _set_attributes(self, flight: Flight, report: LaunchReport) -> None:
        """Store the result with the trial."""
        trial = flight.trial
        trial.set_user_attr(attributes.MESSAGE, report.message)
        trial.set_user_attr(attributes.ATTEMPTS, flight.attempt + 1)
        trial.set_user_attr(attributes.PEAK_BYTES, flight.record.peak_bytes)
        if report.root:
            trial.set_user_attr(attributes.ROOT_LAUNCH, report.root)
        if flight.record.engine is not None:
            trial.set_user_attr(attributes.DATA_PARALLEL_SIZE, flight.record.engine.data_parallel_size)
            trial.set_user_attr(attributes.HOST_THREADS, flight.record.engine.host_threads)
            if not report.root and (values := self._context.profiled.values_at_batch(flight.record.engine)):
                trial.set_user_attr(attributes.SCRIPT_VALUES, values)
        if report.outcome is Outcome.OUT_OF_DATA:
            trial.set_user_attr(attributes.DATA_LIMIT, _data_limit(flight))
        if report.outcome is Outcome.SCRIPT_ERROR:
            trial.set_user_attr(attributes.ERROR, report.cause[:500])
        if flight.record.steps:
            trial.set_user_attr(attributes.OVERHEAD_S, flight.record.outside_steps_s(report.held_s))
            trial.set_user_attr(attributes.STEPS_COMPLETED, flight.record.steps_completed)
        if flight.record.skipped_steps:
            trial.set_user_attr(attributes.SKIPPED_STEPS, flight.record.skipped_steps)
        if flight.record.input_variation:
            trial.set_user_attr(attributes.INPUT_VARIATION, flight.record.input_variation)
        if flight.record.left_out:
            trial.set_user_attr(attributes.LEFT_OUT, flight.record.left_out)
        if flight.record.counted:
            trial.set_user_attr(attributes.METRICS, self.metrics(flight, power_w=report.conditions.power_w))
        trial.set_user_attr(attributes.OUTCOME, report.outcome.value)

    def _raise_script_failure(self, flight: Flight, report: LaunchReport) -> None:
        """Raise ``ScriptFailedError`` if further launches would fail in the same way."""
        ended = report.outcome is Outcome.OUT_OF_DATA and not self._exceeds_data(flight)
        if ended and flight.is_user_config:
            raise ScriptFailedError(
                f"With your config {report.message}. Give it more data or more steps, or measure fewer: "
                "--start-profile-step 1 --end-profile-step 2.",
                log_path=report.log_path,
            )
        error = attributes.repeated_script_error(self._context.trials())
        if error is not None:
            raise ScriptFailedError(
                f"Launch after launch ends with the same error of the script: {error}",
                traceback_tail=report.error_excerpt,
                log_path=report.log_path,
            )

    def _exceeds_data(self, flight: Flight) -> bool:
        """Whether a launch's micro-batch exceeds the samples that a rank has or was fed; smaller sizes may work."""
        samples, fed = self._context.profiled.samples_per_rank, flight.record.observed_micro_batch
        limits = [limit for limit in (samples, fed) if limit is not None]
        return any(int(flight.request.ds_config[ds_config.MICRO_BATCH]) > limit for limit in limits)

    def _notify(self, flight: Flight, report: LaunchReport, value: float | None) -> None:
        trials = self._context.trials()
        best = attributes.best_trials(trials, maximize=self._maximize)
        baseline = attributes.user_config_trial(trials)
        counted = self.metrics(flight) if flight.record.counted else {}
        self._observer(
            TrialFinished(
                number=flight.trial.number,
                words=flight.words,
                outcome=report.outcome,
                value=value,
                speed_up=speed_up(value, None if baseline is None else baseline.values[0], maximize=self._maximize),
                best=bool(best) and best[0].number == flight.trial.number,
                message=report.message,
                launched=attributes.launches_used(trials),
                running=sum(t.state is TrialState.RUNNING and attributes.LAUNCH_ID in t.user_attrs for t in trials),
                own=flight.is_user_config,
                best_so_far=self._best_so_far(trials),
                user_value=None if baseline is None else baseline.values[0],
                speed=None if value is None else self._speed(counted, value),
            )
        )

    def drop(self, trial: optuna.Trial) -> None:
        """Stop tracking a trial that was given to another worker because this worker did not send heartbeats."""
        self._observer(TrialDropped(number=trial.number))
        self._store.heartbeat.remove(self._context.study_uuid, trial.number)

    def _best_so_far(self, trials: Sequence[FrozenTrial]) -> BestSoFar | None:
        """Return the best measured trial; None if nothing was measured."""
        best = attributes.best_trials(trials, maximize=self._maximize)
        return self._shown(best[0], best[0].user_attrs.get(attributes.METRICS, {}), best[0].values[0]) if best else None


def _data_limit(flight: Flight) -> int:
    """Return the samples per rank and global step of which the data seen last for all profile steps, or that were fed.

    More may last, by less than a step in all. Each attempt at that costs a launch, at a batch that no training has.
    """
    config, fed = flight.request.ds_config, flight.record.observed_micro_batch
    micro_batch, accumulation = int(config[ds_config.MICRO_BATCH]), int(config.get(ds_config.GRADIENT_ACCUMULATION, 1))
    batch = micro_batch * accumulation
    if fed is not None and 0 < fed < micro_batch:
        return fed * accumulation
    enough = flight.record.data_seen(batch) // flight.request.end_profile_step
    return max(1, min(enough, batch - 1))
