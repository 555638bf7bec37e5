"""Code shared by the pruners: the lineage of a trial, and rules that stop a running trial by its reported metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.trials.lineage import RETRY_ATTR, Feasibility, Lineage, feasibility, group

_SIGMAS = 3.0
"""Standard errors within which a trial is not stopped."""


def chosen_by_user(trial: FrozenTrial) -> bool:
    """Return whether a trial was enqueued or is the retry of a lost trial; pruners never veto such a trial."""
    return bool(trial.system_attrs.get("fixed_params")) or RETRY_ATTR in trial.system_attrs


def lineage_of(trial: FrozenTrial, lineages: Mapping[str, Lineage], *, micro_batch: str) -> Lineage | None:
    """Return the lineage of a trial, without trials if it is the first; None if the trial has no micro-batch."""
    running = next(iter(group([trial], micro_batch=micro_batch).values()), None)
    if running is None:
        return None
    empty = Lineage(key=running.key, params=running.params, trials=(), micro_batch=micro_batch)
    return lineages.get(running.key, empty)


def step_noise(finished: Sequence[FrozenTrial]) -> float:
    """Return the median of standard deviation / mean over completed trials with two finite reports; 0 without any."""
    noises = []
    for trial in finished:
        values = [value for value in trial.intermediate_values.values() if math.isfinite(value)]
        mean = statistics.fmean(values) if len(values) > 1 else 0.0
        if trial.state == TrialState.COMPLETE and mean:
            noises.append(statistics.stdev(values) / abs(mean))
    return statistics.median(noises) if noises else 0.0


def _best_mean(finished: Sequence[FrozenTrial], steps: Collection[int], direction: StudyDirection) -> float | None:
    """Return the best mean of a completed trial's reports at the steps, None if no trial reported all steps."""
    means = []
    for trial in finished:
        values = [trial.intermediate_values.get(step, math.nan) for step in steps]
        if trial.state == TrialState.COMPLETE and all(map(math.isfinite, values)):
            means.append(statistics.fmean(values))
    return (max if direction == StudyDirection.MAXIMIZE else min)(means, default=None)


def cannot_win(
    trial: FrozenTrial, finished: Sequence[FrozenTrial], *, direction: StudyDirection, margin: float
) -> bool:
    """Return whether a trial's best plausible metric is worse than the best completed trial's at the same steps.

    With ``m`` the mean of the trial's n reports and ``b`` the mean of the best trial's reports at the same
    steps, the trial cannot win when ``m`` is worse than ``b`` by more than ``max(margin, 3 s sqrt(2 / n)) *
    |b|``, where s is the noise of a step relative to its mean, estimated from completed trials.

    ``margin`` is the minimum relative distance from the best at which a trial is stopped.
    """
    mine = {step: value for step, value in trial.intermediate_values.items() if math.isfinite(value)}
    rival = _best_mean(finished, mine, direction) if mine else None
    if rival is None:
        return False
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    best = sign * rival
    allowed = max(margin, _SIGMAS * step_noise(finished) * math.sqrt(2 / len(mine)))
    return sign * statistics.fmean(mine.values()) > best + allowed * abs(best)


def below_rung(
    trial: FrozenTrial,
    finished: Sequence[FrozenTrial],
    pending: Sequence[FrozenTrial],
    *,
    direction: StudyDirection,
    divisor: int,
    early_stopping: int,
) -> bool:
    """Return whether successive halving over steps stops a trial.

    The resource is the number of reports: a trial is judged after ``divisor ** (early_stopping + k)`` reports,
    for k = 0, 1, ... It continues while it is among the best ``1 / divisor`` of all trials that reported the same
    step, including itself (Li et al. 2018, arXiv:1810.05934). With fewer than ``divisor`` trials it is not
    stopped. Trials that ran out of memory later do not count.
    """
    made = len(trial.intermediate_values)
    rung = divisor**early_stopping
    while rung < made:
        rung *= divisor
    if rung != made:
        return False
    step = max(trial.intermediate_values)
    mine = trial.intermediate_values[step]
    if math.isnan(mine):
        return False
    fitting = [_report(t, step) for t in finished if feasibility(t) is Feasibility.FITS]
    running = [_report(t, step) for t in pending if t.state == TrialState.RUNNING]
    others = [value for value in (*fitting, *running) if not math.isnan(value)]
    count = len(others) + 1
    if count < divisor:
        return False
    better = sum(value > mine if direction == StudyDirection.MAXIMIZE else value < mine for value in others)
    return better >= max(count // divisor, 1)


def _report(trial: FrozenTrial, step: int) -> float:
    return trial.intermediate_values.get(step, math.nan)
