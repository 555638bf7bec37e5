"""What becomes of a launch, told to the study, the store and whoever watches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.config import ds_config
from optuna_dsat.errors import ScriptFailedError
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest
from optuna_dsat.metrics import speed_up
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store
from optuna_dsat.study.profile import Profiled
from optuna_dsat.study.progress import Observer, TrialDropped, TrialFinished
from optuna_dsat.study.progress_summary import best_so_far
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes

__all__ = ["Flight", "TrialRecorder", "objective"]

_RANK = re.compile(r"^rank \d+: ")
"""Which rank failed first may differ from launch to launch."""

_STATES = {
    Outcome.MEASURED: TrialState.COMPLETE,
    Outcome.OUT_OF_MEMORY: TrialState.PRUNED,
    Outcome.HOST_OUT_OF_MEMORY: TrialState.PRUNED,
    Outcome.OUT_OF_DATA: TrialState.PRUNED,
    Outcome.PRUNED: TrialState.PRUNED,
}
"""Outcome -> state of the trial; everything else is FAIL."""


@dataclass(kw_only=True)
class Flight:
    """A trial whose launch is in flight."""

    trial: optuna.Trial
    request: LaunchRequest
    record: LaunchRecord
    words: str
    attempt: int = 0


class TrialRecorder:
    """Tells trials of one study what became of their launches.

    Args:
        spec: The study's spec.
        study: The Optuna study.
        study_uuid: The study's own identifier in the store.
        profiled: What the profile launch taught.
        store: Launches and heartbeats.
        observer: Hears the news.
    """

    def __init__(
        self,
        spec: StudySpec,
        *,
        study: optuna.Study,
        study_uuid: str,
        profiled: Profiled,
        store: Store,
        observer: Observer,
    ) -> None:
        self._study = study
        self._uuid = study_uuid
        self._profiled = profiled
        self._store = store
        self._observer = observer
        self._maximize = spec.direction == "maximize"
        self.metric = objective(spec, profiled)
        """The metric that is optimised."""

    def metrics(self, flight: Flight) -> dict[str, float]:
        """Return the metrics of the steps that count so far."""
        return flight.record.metrics(flops_per_sample=self._profiled.profile.flops_per_sample)

    def record(self, flight: Flight, report: LaunchReport) -> None:
        """Store what is known of a launch; called again, it replaces what was stored."""
        self._store.record_launch(
            self._uuid,
            report,
            trial_number=flight.trial.number,
            purpose=flight.request.purpose,
            attempt=flight.attempt,
        )

    def record_steps(self, flight: Flight) -> None:
        """Store the measured steps of a launch; once it is settled there are no more."""
        self._store.record_steps(self._uuid, flight.request.launch_id, flight.record.events)

    def tell(self, flight: Flight, report: LaunchReport) -> None:
        """Finish the trial; one that was given to another worker is dropped.

        Raises:
            ScriptFailedError: If the script fails whatever the configuration.
        """
        trial = flight.trial
        if self._store.heartbeat.is_lost(trial):
            self.drop(trial)
            return
        measured = report.outcome is Outcome.MEASURED
        value = None
        trial.set_user_attr(attributes.MESSAGE, report.message)
        trial.set_user_attr(attributes.ATTEMPTS, flight.attempt + 1)
        trial.set_user_attr(attributes.PEAK_BYTES, flight.record.peak_bytes)
        if flight.record.engine is not None:
            trial.set_user_attr(attributes.DATA_PARALLEL_SIZE, flight.record.engine.data_parallel_size)
            trial.set_user_attr(attributes.HOST_THREADS, flight.record.engine.host_threads)
        if report.outcome is Outcome.OUT_OF_DATA:
            trial.set_user_attr(attributes.DATA_LIMIT, _data_limit(flight))
        if report.outcome is Outcome.SCRIPT_ERROR:
            trial.set_user_attr(attributes.ERROR, _RANK.sub("", report.message)[:500])
        if flight.record.steps:
            steps_s = sum(step.latency_s for step in flight.record.steps)
            trial.set_user_attr(attributes.OVERHEAD_S, max(0.0, report.held_s - steps_s))
        if flight.record.counted:
            metrics = self.metrics(flight)
            trial.set_user_attr(attributes.METRICS, metrics)
            value = metrics[self.metric] if measured else None
        trial.set_user_attr(attributes.OUTCOME, report.outcome.value)
        self._study.tell(trial, value, state=_STATES.get(report.outcome, TrialState.FAIL), skip_if_finished=True)
        self._store.heartbeat.remove(trial)
        self._tell_observer(flight, report, value)
        if report.outcome is Outcome.OUT_OF_DATA and trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG:
            raise ScriptFailedError(
                f"With your own config {report.message}. Give it more data or more steps, or measure fewer: "
                "--start-profile-step 1 --end-profile-step 2.",
                log_path=report.log_path,
            )
        error = attributes.repeated_script_error(self._trials())
        if error is not None:
            raise ScriptFailedError(
                f"Launch after launch ends with the same error of the script: {error}",
                traceback_tail=report.error_excerpt,
                log_path=report.log_path,
            )

    def _tell_observer(self, flight: Flight, report: LaunchReport, value: float | None) -> None:
        trials = self._trials()
        best = attributes.best_trials(trials, maximize=self._maximize)
        baseline = attributes.user_config_trial(trials)
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
                own=flight.trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG,
                best_so_far=best_so_far(trials, maximize=self._maximize),
                user_value=None if baseline is None else baseline.values[0],
            )
        )

    def drop(self, trial: optuna.Trial) -> None:
        """Forget a trial that was given to another worker, because this one was frozen or cut off for long."""
        self._observer(TrialDropped(number=trial.number))
        self._store.heartbeat.remove(trial)

    def _trials(self) -> Sequence[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)


def _data_limit(flight: Flight) -> int:
    """Return the most samples of a global step on one rank that leave the data enough for all profile steps."""
    config = flight.request.ds_config
    batch = int(config[ds_config.MICRO_BATCH]) * int(config.get(ds_config.GRADIENT_ACCUMULATION, 1))
    enough = flight.record.data_at_most(batch) // flight.request.end_profile_step
    return max(1, min(enough, batch - 1))


def objective(spec: StudySpec, profiled: Profiled) -> str:
    """Return the metric that is optimised: the one asked for, or throughput where FLOPs could not be counted.

    FLOPs per sample are the same for every configuration, so both rank alike.
    """
    if spec.metric == "FLOPS_per_gpu" and profiled.profile.flops_per_sample <= 0:
        return "throughput"
    return spec.metric
