"""Stopping a job in flight: pure functions over the metrics that trials reported step by step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.lineage import Evidence, evidence

__all__ = ["below_rung", "cannot_win", "step_noise"]

_SIGMAS = 3.0
"""A job is given the benefit of this many standard errors."""


def step_noise(trials: Iterable[FrozenTrial]) -> float:
    """Return the noise of one step: the median over trials of (standard deviation / mean) of their reports.

    Trials with fewer than two finite reports tell nothing; without any, the noise is 0.
    """
    found = []
    for trial in trials:
        values = [value for value in trial.intermediate_values.values() if math.isfinite(value)]
        mean = statistics.fmean(values) if len(values) > 1 else 0.0
        if mean:
            found.append(statistics.stdev(values) / abs(mean))
    return statistics.median(found) if found else 0.0


def cannot_win(trial: FrozenTrial, others: Sequence[FrozenTrial], *, direction: StudyDirection, margin: float) -> bool:
    """Return whether a job's best plausible metric is worse than the best completed trial's at those steps.

    With ``m`` the mean of the job's n reports and ``b`` the mean of the best trial's reports at the same
    steps, the job cannot win when ``m`` is worse than ``b`` by more than ``max(margin, 3 s sqrt(2 / n)) *
    |b|``, where s is the noise of one step relative to its mean, taken from completed trials.

    Args:
        trial: The running trial.
        others: The study's trials.
        direction: What is better.
        margin: Least relative distance from the best that stops a job.
    """
    complete = [t for t in others if t.state == TrialState.COMPLETE and t.number != trial.number]
    mine = {step: value for step, value in trial.intermediate_values.items() if math.isfinite(value)}
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    rivals = [
        sign * statistics.fmean(t.intermediate_values[step] for step in mine)
        for t in complete
        if mine and all(math.isfinite(t.intermediate_values.get(step, math.nan)) for step in mine)
    ]
    if not rivals:
        return False
    best = min(rivals)
    allowed = max(margin, _SIGMAS * step_noise(complete) * math.sqrt(2 / len(mine)))
    return sign * statistics.fmean(mine.values()) > best + allowed * abs(best)


def below_rung(
    trial: FrozenTrial,
    others: Sequence[FrozenTrial],
    *,
    direction: StudyDirection,
    divisor: int,
    early_stopping: int,
) -> bool:
    """Return whether a job fell out of successive halving over its steps.

    The resource is the number of reports: a job is judged after ``divisor ** (early_stopping + k)`` of them,
    for k = 0, 1, ... It stays while it is among the best ``1 / divisor`` of all trials that reported the same
    step, itself included (Li et al. 2018, arXiv:1810.05934). With fewer than ``divisor`` trials there is no
    judgement.

    Args:
        trial: The running trial.
        others: The study's trials; those in flight and those that ran out of memory later count as well.
        direction: What is better.
        divisor: ``eta`` of the paper.
        early_stopping: ``s`` of the paper.
    """
    reports = len(trial.intermediate_values)
    rung = divisor**early_stopping
    while rung < reports:
        rung *= divisor
    if rung != reports:
        return False
    step = max(trial.intermediate_values)
    mine = trial.intermediate_values[step]
    shown = [
        t.intermediate_values[step]
        for t in others
        if t.number != trial.number
        and step in t.intermediate_values
        and (evidence(t) is Evidence.FITS or t.state == TrialState.RUNNING)
        and not math.isnan(t.intermediate_values[step])
    ]
    if math.isnan(mine) or len(shown) + 1 < divisor:
        return False
    keep = max((len(shown) + 1) // divisor, 1)
    better = sum(v > mine if direction == StudyDirection.MAXIMIZE else v < mine for v in shown)
    return better >= keep
