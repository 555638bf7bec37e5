"""Stopping a job in flight, by the metrics that trials reported step by step."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.trials.lineage import Feasibility, feasibility
from optuna_dsat.trials.lineage_cache import StudyHistory

__all__ = ["Reports", "below_rung", "cannot_win", "reports_of"]

K = TypeVar("K")
V = TypeVar("V")

_SIGMAS = 3.0
"""A job is given the benefit of this many standard errors."""
_MOST_QUESTIONS = 128
"""Answers that are kept up to date, of each kind; those not asked for lately are dropped."""


class Reports:
    """What finished trials reported.

    Each answer is kept and brought up to date by the trials that finished since it was asked for last.

    Args:
        finished: Finished trials; more may be appended to the sequence.
    """

    def __init__(self, finished: Sequence[FrozenTrial]) -> None:
        self._finished = finished
        self._noise: list[float] = []
        self._noise_of = 0
        """Trials that ``_noise`` covers; likewise below."""
        self._best: OrderedDict[tuple[StudyDirection, tuple[int, ...]], tuple[float | None, int]] = OrderedDict()
        self._shown: OrderedDict[int, tuple[list[float], int]] = OrderedDict()

    def noise(self) -> float:
        """Return the noise of one step: the median over completed trials of (standard deviation / mean).

        Trials with fewer than two finite reports tell nothing; without any, the noise is 0.
        """
        for trial in self._finished[self._noise_of :]:
            if trial.state == TrialState.COMPLETE:
                values = [value for value in trial.intermediate_values.values() if math.isfinite(value)]
                mean = statistics.fmean(values) if len(values) > 1 else 0.0
                if mean:
                    insort(self._noise, statistics.stdev(values) / abs(mean))
        self._noise_of = len(self._finished)
        middle = self._noise[(len(self._noise) - 1) // 2 : len(self._noise) // 2 + 1]
        return statistics.median(middle) if middle else 0.0

    def best(self, steps: tuple[int, ...], direction: StudyDirection) -> float | None:
        """Return the best mean that a completed trial reported at these steps, None where none reported all."""
        best, seen = self._best.pop((direction, steps), (None, 0))
        better = max if direction == StudyDirection.MAXIMIZE else min
        for trial in self._finished[seen:]:
            if trial.state == TrialState.COMPLETE:
                values = [trial.intermediate_values.get(step, math.nan) for step in steps]
                if all(map(math.isfinite, values)):
                    mean = statistics.fmean(values)
                    best = mean if best is None else better(best, mean)
        _keep(self._best, (direction, steps), (best, len(self._finished)))
        return best

    def shown(self, step: int) -> Sequence[float]:
        """Return what trials that fit reported at a step, ascending, without NaN."""
        values, seen = self._shown.pop(step, ([], 0))
        for trial in self._finished[seen:]:
            value = trial.intermediate_values.get(step, math.nan)
            if not math.isnan(value) and feasibility(trial) is Feasibility.FITS:
                insort(values, value)
        _keep(self._shown, step, (values, len(self._finished)))
        return values


def reports_of(history: StudyHistory) -> Reports:
    """Return what the finished trials of a history reported."""
    return history.kept(Reports, lambda: Reports(history.finished))


def cannot_win(trial: FrozenTrial, reports: Reports, *, direction: StudyDirection, margin: float) -> bool:
    """Return whether a job's best plausible metric is worse than the best completed trial's at those steps.

    With ``m`` the mean of the job's n reports and ``b`` the mean of the best trial's reports at the same
    steps, the job cannot win when ``m`` is worse than ``b`` by more than ``max(margin, 3 s sqrt(2 / n)) *
    |b|``, where s is the noise of one step relative to its mean, taken from completed trials.

    Args:
        trial: The running trial.
        reports: What other trials reported.
        direction: What is better.
        margin: Least relative distance from the best that stops a job.
    """
    mine = {step: value for step, value in trial.intermediate_values.items() if math.isfinite(value)}
    rival = reports.best(tuple(sorted(mine)), direction) if mine else None
    if rival is None:
        return False
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    best = sign * rival
    allowed = max(margin, _SIGMAS * reports.noise() * math.sqrt(2 / len(mine)))
    return sign * statistics.fmean(mine.values()) > best + allowed * abs(best)


def below_rung(
    trial: FrozenTrial,
    reports: Reports,
    pending: Sequence[FrozenTrial],
    *,
    direction: StudyDirection,
    divisor: int,
    early_stopping: int,
) -> bool:
    """Return whether a job fell out of successive halving over its steps.

    The resource is the number of reports: a job is judged after ``divisor ** (early_stopping + k)`` of them,
    for k = 0, 1, ... It stays while it is among the best ``1 / divisor`` of all trials that reported the same
    step, itself included (Li et al. 2018, arXiv:1810.05934). With fewer than ``divisor`` trials there is no
    judgement. Trials that ran out of memory later do not count.

    Args:
        trial: The running trial.
        reports: What finished trials reported.
        pending: The others in flight, which count as well.
        direction: What is better.
        divisor: ``eta`` of the paper.
        early_stopping: ``s`` of the paper.
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
    shown = reports.shown(step)
    running = [_report(t.intermediate_values, step) for t in pending if t.state == TrialState.RUNNING]
    running = [value for value in running if not math.isnan(value)]
    count = len(shown) + len(running) + 1
    if count < divisor:
        return False
    if direction == StudyDirection.MAXIMIZE:
        better = len(shown) - bisect_right(shown, mine) + sum(value > mine for value in running)
    else:
        better = bisect_left(shown, mine) + sum(value < mine for value in running)
    return better >= max(count // divisor, 1)


def _report(reports: Mapping[int, float], step: int) -> float:
    return reports.get(step, math.nan)


def _keep(answers: OrderedDict[K, V], question: K, answer: V) -> None:
    answers[question] = answer
    if len(answers) > _MOST_QUESTIONS:
        answers.popitem(last=False)
