"""What a study's history says: pure functions over frozen trials.

User attributes on trials are the tuner's record of a trial; their names are defined here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.outcome import Outcome

__all__ = [
    "ATTEMPTS",
    "CONFIG",
    "CONFIGURATION",
    "CONFIG_KEY",
    "DATA_LIMIT",
    "DATA_PARALLEL_SIZE",
    "END_REASON",
    "ERROR",
    "FINALISTS",
    "FINGERPRINT",
    "HOST_THREADS",
    "LAUNCH_ID",
    "MESSAGE",
    "METRICS",
    "OUTCOME",
    "OVERHEAD_S",
    "OVERLAY",
    "PEAK_BYTES",
    "PURPOSE",
    "USER_CONFIG",
    "VETOED",
    "WARM_START",
    "WINNER",
    "best_trials",
    "data_limit",
    "data_parallel_size",
    "launches_since_best",
    "launches_used",
    "measured_peaks",
    "repeated_script_error",
    "user_config_trial",
]

OUTCOME = "outcome"
"""Value of ``Outcome``, once the launch is over."""
LAUNCH_ID = "launch_id"
"""Set when a trial is launched: from then on it counts against the budget."""
VETOED = "vetoed"
"""Why the trial was held back before any launch."""
MESSAGE = "message"
METRICS = "metrics"
CONFIG = "config"
CONFIGURATION = "configuration"
"""The config in a few words, for people who look at trials in a dashboard."""
OVERLAY = "overlay"
"""What the trial laid over the config that the script passes."""
CONFIG_KEY = "config_key"
DATA_PARALLEL_SIZE = "data_parallel_size"
"""Ranks of the launch that consumed different samples, where an engine said so."""
HOST_THREADS = "host_threads"
"""Threads that each rank of the launch computed with on the host."""
PEAK_BYTES = "peak_memory_bytes"
OVERHEAD_S = "overhead_s"
"""Seconds that the launch took beside its steps, where it came to any."""
ATTEMPTS = "attempts"
DATA_LIMIT = "data_limit"
"""Most samples of one global step on one rank that the data allows, learnt from a launch that ran out of it."""
ERROR = "error"
"""What a script error said, without the rank that said it."""
PURPOSE = "purpose"
USER_CONFIG = "user_config"
"""``PURPOSE`` of the trial that measures the user's present config."""
FINALISTS = "finalists"
"""On the study: what was measured again with more steps."""
FINGERPRINT = "profile_fingerprint"
"""On the study: under which key the store keeps its profile."""
END_REASON = "end_reason"
"""On the study: why its search last ended, a value of ``optuna_dsat.study.tuner.EndReason``."""
WARM_START = "warm_start"
"""Study attribute: what earlier studies taught (``optuna_dsat.guided.prior_knowledge``), empty for nothing."""
WINNER = "winner"
"""On the study: number of the trial that won."""


def launches_used(trials: Sequence[FrozenTrial]) -> int:
    """Return how many trials count against the budget: launched and not lost with their worker."""
    return sum(
        LAUNCH_ID in trial.user_attrs
        and trial.user_attrs.get(OUTCOME) != Outcome.LOST
        and (trial.state is TrialState.RUNNING or OUTCOME in trial.user_attrs)
        for trial in trials
    )


def best_trials(trials: Sequence[FrozenTrial], *, maximize: bool) -> list[FrozenTrial]:
    """Return the measured trials, best first; ties go to the earlier trial."""
    measured = [t for t in trials if t.state is TrialState.COMPLETE and t.value is not None]
    return sorted(measured, key=lambda t: (-t.values[0] if maximize else t.values[0], t.number))


def launches_since_best(trials: Sequence[FrozenTrial], *, maximize: bool) -> int:
    """Return how many launches ended since the best one was measured; 0 before anything was measured."""
    ended = sorted(
        (t for t in trials if OUTCOME in t.user_attrs and t.datetime_complete is not None),
        key=lambda t: (t.datetime_complete, t.number),
    )
    best = best_trials(trials, maximize=maximize)
    if not best:
        return 0
    numbers = [t.number for t in ended]
    return len(numbers) - 1 - numbers.index(best[0].number) if best[0].number in numbers else 0


def data_parallel_size(trial: FrozenTrial, *, slots: int) -> int:
    """Return the ranks of a trial's launch that consumed different samples: all of its slots unless it said less."""
    return int(trial.user_attrs.get(DATA_PARALLEL_SIZE) or slots)


def user_config_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the measured trial of the user's own config, if there is one."""
    for trial in trials:
        if trial.user_attrs.get(PURPOSE) == USER_CONFIG and trial.state is TrialState.COMPLETE:
            return trial
    return None


def measured_peaks(trials: Sequence[FrozenTrial]) -> list[tuple[dict[str, Any], int, int]]:
    """Return (DeepSpeed config, micro-batch, peak bytes of the worst rank) of every trial that ran a full step."""
    return [
        (
            trial.user_attrs[CONFIG],
            int(trial.user_attrs[CONFIG]["train_micro_batch_size_per_gpu"]),
            int(trial.user_attrs[PEAK_BYTES]),
        )
        for trial in trials
        if CONFIG in trial.user_attrs and trial.user_attrs.get(PEAK_BYTES, 0) > 0
    ]


def data_limit(trials: Sequence[FrozenTrial]) -> int | None:
    """Return the most samples of one global step on one rank that the script's data allows, None where it never ended.

    Samples are those of the micro-batch times the accumulation; the data is the same for every lineage.
    """
    return min((trial.user_attrs[DATA_LIMIT] for trial in trials if DATA_LIMIT in trial.user_attrs), default=None)


def repeated_script_error(trials: Sequence[FrozenTrial], *, times: int = 3) -> str | None:
    """Return the error that the last ``times`` launches all ended with; None once anything was measured."""
    if any(t.state is TrialState.COMPLETE for t in trials):
        return None
    ended = [t for t in trials if OUTCOME in t.user_attrs and t.user_attrs[OUTCOME] != Outcome.LOST][-times:]
    errors = {t.user_attrs.get(ERROR) for t in ended if t.user_attrs[OUTCOME] == Outcome.SCRIPT_ERROR}
    if len(ended) < times or len(errors) != 1:
        return None
    if any(t.user_attrs[OUTCOME] != Outcome.SCRIPT_ERROR for t in ended):
        return None
    return errors.pop()
