"""Names of the attributes that the tuner sets on trials and studies, and pure functions that read them.

Attributes are user attributes of a trial, unless documented otherwise; their names are defined here only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.config.ds_config import batch_triangle, effective
from optuna_dsat.config.knobs import COMPILE, MODEL
from optuna_dsat.outcome import Outcome

OUTCOME = "outcome"
"""Value of ``Outcome``; set when the launch ends."""
LAUNCH_ID = "launch_id"
"""Identifier of the launch; set when it starts. From then on the trial counts against the budget."""
ROOT_LAUNCH = "root_launch"
"""Identifier of the launch that started the processes which measured the trial; absent if they were its own."""
VETOED = "vetoed"
"""Reason why the trial was finished without a launch."""
MESSAGE = "message"
METRICS = "metrics"
METRIC = "metric"
"""Study attribute: name of the optimised metric, for users of Optuna's tools."""
CONFIG = "config"
CONFIGURATION = "configuration"
"""Short description of the config, shown in dashboards."""
SCRIPT_VALUES = "script_values"
"""Dotted key -> value of settings that the script computes from the trial's batch; absent without any."""
OVERLAY = "overlay"
"""JSON object merged over the config that the script passes to DeepSpeed."""
CONFIG_KEY = "config_key"
DATA_PARALLEL_SIZE = "data_parallel_size"
"""Data-parallel ranks of the launch, as reported by the engine; absent if not reported."""
HOST_THREADS = "host_threads"
"""Host compute threads per rank."""
PEAK_BYTES = "peak_memory_bytes"
"""Peak device memory of the worst rank, in bytes."""
PREDICTED_PEAK_BYTES = "predicted_peak_memory_bytes"
"""Peak device memory of a rank, in bytes, that the memory model predicted when the trial was proposed."""
PREDICTED_VALUE = "predicted_value"
"""The metric that the method predicted when it proposed the trial; absent if it predicts none."""
SKIPPED_STEPS = "skipped_steps"
"""Steps of the launch that the loss scaler skipped; absent if 0."""
STEPS_COMPLETED = "steps_completed"
"""Batches completed by the training at the launch's last step, as counted by Determined; absent without a step."""
INPUT_VARIATION = "input_variation"
"""Range of the input size per sample over the counted steps, relative to the mean; absent if 0."""
LEFT_OUT = "evaluation_share"
"""Share of the time of the counted steps that occasional evaluation took, which is not counted; absent if 0."""
OVERHEAD_S = "overhead_s"
"""Launch seconds outside the counted training steps; absent if no step ran."""
ATTEMPTS = "attempts"
DATA_LIMIT = "data_limit"
"""Upper bound on samples per rank and global step, measured by a launch that exhausted the script's data."""
ERROR = "error"
"""Message of a script error, without the rank prefix."""
PURPOSE = "purpose"
REASON = "reason"
"""Why the trial was launched, in a phrase."""
USER_CONFIG = "user_config"
"""Value of ``PURPOSE`` for the trial that measures the user's own config."""
SAME_BATCH = "same_batch"
"""Reason for a trial that was proposed to find the fastest config at the user's global batch."""
SIMPLIFIES = "simplifies"
"""Number of the trial, best in the search, that this trial repeats without its drawn settings."""
CONFIRMATION = "confirmation"
"""Study attribute: the rounds in which finalists and the user's config were measured again, written by
``optuna_dsat.study.confirm.rounds.Rounds``."""
FINGERPRINT = "profile_fingerprint"
"""Study attribute: key of the study's profile in the store."""
END_REASON = "end_reason"
"""Study attribute: why the last search ended, a value of ``optuna_dsat.study.end_reason.EndReason``."""
HEADROOM = "headroom"
"""Study attribute: possible remaining gain as a share of the metric (``StudyResult.headroom``); None if unknown."""
WARM_START = "warm_start"
"""Study attribute: prior knowledge from earlier studies (``optuna_dsat.guided.prior_knowledge``); empty if none."""
WRITTEN = "written"
"""Study attribute: file name -> SHA-256 digest of each file of the result as last written by the study."""
WINNER = "winner"
"""Study attribute: number of the trial selected when the study was last concluded."""
RESULT = "result"
"""Study attribute: the verdict as text, for users of Optuna's tools."""


def root_launch(trial: FrozenTrial) -> str:
    """Return the identifier of the launch whose processes measured a trial; unique to a trial without a launch."""
    attrs = trial.user_attrs
    return str(attrs.get(ROOT_LAUNCH) or attrs.get(LAUNCH_ID) or f"trial {trial.number}")


def waiting_launch(trials: Sequence[FrozenTrial]) -> str | None:
    """Return the launch whose ranks wait for another trial, as ``root_launch``; None if none waits.

    It is the launch of the latest trial if that was measured and no trial was started since. Launches are assumed to
    continue once any trial of the study continued another.
    """
    ended = [
        (trial.datetime_complete, trial.number, trial)
        for trial in trials
        if trial.datetime_complete is not None and OUTCOME in trial.user_attrs
    ]
    if not any(ROOT_LAUNCH in trial.user_attrs for *_, trial in ended):
        return None
    ended_at, _, latest = max(ended, key=lambda item: item[:2])
    if (latest.user_attrs.get(CONFIG, {}).get(MODEL) or {}).get(COMPILE):
        return None  # a compiled engine has one shape of inputs
    running = (trial.datetime_start for trial in trials if trial.state is TrialState.RUNNING)
    if any(started is not None and started >= ended_at for started in running):
        return None
    return root_launch(latest) if latest.user_attrs[OUTCOME] == Outcome.MEASURED else None


def launches_used(trials: Sequence[FrozenTrial]) -> int:
    """Return the number of trials that count against the budget: launched, not lost, and not simplifying the best."""
    return sum(
        LAUNCH_ID in trial.user_attrs
        and SIMPLIFIES not in trial.user_attrs
        and trial.user_attrs.get(OUTCOME) != Outcome.LOST
        and (trial.state is TrialState.RUNNING or OUTCOME in trial.user_attrs)
        for trial in trials
    )


def best_trials(trials: Sequence[FrozenTrial], *, maximize: bool) -> list[FrozenTrial]:
    """Return the measured trials, best first; ties go to the earlier trial."""
    measured = [t for t in trials if t.state is TrialState.COMPLETE and t.value is not None]
    return sorted(measured, key=lambda t: (-t.values[0] if maximize else t.values[0], t.number))


def commonest_message(trials: Sequence[FrozenTrial]) -> str:
    """Return the most frequent outcome of launches without a measurement; empty without such a launch."""
    ended = [trial for trial in trials if trial.state.is_finished() and LAUNCH_ID in trial.user_attrs]
    failed = [
        trial.user_attrs for trial in ended if trial.user_attrs.get(OUTCOME) not in (Outcome.MEASURED, Outcome.LOST)
    ]
    result = Counter(str(attrs[MESSAGE]) for attrs in failed if attrs.get(MESSAGE))
    return result.most_common(1)[0][0] if result else ""


def launches_since_best(trials: Sequence[FrozenTrial], *, maximize: bool) -> int:
    """Return the number of launches that count, of the search for the best, and ended after the best launch."""
    best = best_trials(trials, maximize=maximize)
    if not best or best[0].datetime_complete is None:
        return 0
    moment = (best[0].datetime_complete, best[0].number)
    later = [t for t in trials if t.datetime_complete is not None and (t.datetime_complete, t.number) > moment]
    return launches_used([t for t in later if SAME_BATCH not in t.user_attrs])


def data_parallel_size(trial: FrozenTrial, *, slots: int) -> int:
    """Return the data-parallel ranks of a trial's launch; ``slots`` if not reported by the engine."""
    return int(trial.user_attrs.get(DATA_PARALLEL_SIZE) or slots)


def train_batch_size(trial: FrozenTrial, *, slots: int) -> int:
    """Return the global batch of a trial's launch, in samples; ``slots`` is the default number of ranks."""
    ranks = data_parallel_size(trial, slots=slots)
    return batch_triangle(effective(trial.user_attrs[CONFIG]), world_size=ranks).train_batch_size


def peak_bytes(trial: FrozenTrial) -> int:
    """Return the peak of the fullest rank's device memory; 0 if unknown."""
    return int(trial.user_attrs.get(PEAK_BYTES) or 0)


def step_facts(trial: FrozenTrial) -> dict[str, Any]:
    """Return the arguments of ``words.steps_in_words`` for the steps of a trial's launch."""
    attrs = trial.user_attrs
    return {
        "skipped": int(attrs.get(SKIPPED_STEPS, 0)),
        "variation": float(attrs.get(INPUT_VARIATION, 0.0)),
        "metrics": attrs.get(METRICS, {}),
        "left_out": float(attrs.get(LEFT_OUT, 0.0)),
    }


def user_config_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the completed trial of the baseline, or None."""
    for trial in trials:
        if trial.user_attrs.get(PURPOSE) == USER_CONFIG and trial.state is TrialState.COMPLETE:
            return trial
    return None


def data_limit(trials: Sequence[FrozenTrial]) -> int | None:
    """Return the samples per rank and global step in the dataset, a bound for all lineages; None if never exhausted."""
    return min((trial.user_attrs[DATA_LIMIT] for trial in trials if DATA_LIMIT in trial.user_attrs), default=None)


def repeated_script_error(trials: Sequence[FrozenTrial]) -> str | None:
    """Return the script error shared by the last three launches, None if they differ or any trial was measured."""
    if any(t.state is TrialState.COMPLETE for t in trials):
        return None
    ended = [t for t in trials if OUTCOME in t.user_attrs and t.user_attrs[OUTCOME] != Outcome.LOST][-3:]
    errors = {t.user_attrs.get(ERROR) for t in ended if t.user_attrs[OUTCOME] == Outcome.SCRIPT_ERROR}
    if len(ended) < 3 or len(errors) != 1:
        return None
    if any(t.user_attrs[OUTCOME] != Outcome.SCRIPT_ERROR for t in ended):
        return None
    return errors.pop()
