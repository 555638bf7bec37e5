"""Rules that stop a running trial, based on the metrics that trials report per step."""

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
"""Standard errors within which a trial is not stopped."""
_MAX_CACHED = 128
"""Largest number of cached results of each kind; the least recently used are dropped."""


class Reports:
    """Statistics over the reports of finished trials.

    Results are cached and updated with the trials that finished since the last query.
    """

    def __init__(self, finished: Sequence[FrozenTrial]) -> None:
        self._finished = finished
        self._noise: list[float] = []
        self._noise_read = 0
        """Number of trials that ``_noise`` covers."""
        self._best: OrderedDict[tuple[StudyDirection, tuple[int, ...]], tuple[float | None, int]] = OrderedDict()
        self._at_step: OrderedDict[int, tuple[list[float], int]] = OrderedDict()

    def noise(self) -> float:
        """Return the noise of a step: the median over completed trials of (standard deviation / mean).

        Trials with fewer than two finite reports are ignored; without other trials, the noise is 0.
        """
        for trial in self._finished[self._noise_read :]:
            if trial.state == TrialState.COMPLETE:
                values = [value for value in trial.intermediate_values.values() if math.isfinite(value)]
                mean = statistics.fmean(values) if len(values) > 1 else 0.0
                if mean:
                    insort(self._noise, statistics.stdev(values) / abs(mean))
        self._noise_read = len(self._finished)
        middle = self._noise[(len(self._noise) - 1) // 2 : len(self._noise) // 2 + 1]
        return statistics.median(middle) if middle else 0.0

    def best(self, steps: tuple[int, ...], direction: StudyDirection) -> float | None:
        """Return the best mean of a completed trial's reports at the steps, None if no trial reported all steps."""
        best, read = self._best.pop((direction, steps), (None, 0))
        better = max if direction == StudyDirection.MAXIMIZE else min
        for trial in self._finished[read:]:
            if trial.state == TrialState.COMPLETE:
                values = [trial.intermediate_values.get(step, math.nan) for step in steps]
                if all(map(math.isfinite, values)):
                    mean = statistics.fmean(values)
                    best = mean if best is None else better(best, mean)
        _keep(self._best, (direction, steps), (best, len(self._finished)))
        return best

    def at_step(self, step: int) -> Sequence[float]:
        """Return the reports at a step of trials that fitted, ascending, without NaN."""
        values, read = self._at_step.pop(step, ([], 0))
        for trial in self._finished[read:]:
            value = trial.intermediate_values.get(step, math.nan)
            if not math.isnan(value) and feasibility(trial) is Feasibility.FITS:
                insort(values, value)
        _keep(self._at_step, step, (values, len(self._finished)))
        return values


def reports_of(history: StudyHistory) -> Reports:
    """Return the statistics of a history's finished trials, cached with it."""
    return history.cached(Reports, lambda: Reports(history.finished))


def cannot_win(trial: FrozenTrial, reports: Reports, *, direction: StudyDirection, margin: float) -> bool:
    """Return whether a trial's best plausible metric is worse than the best completed trial's at the same steps.

    With ``m`` the mean of the trial's n reports and ``b`` the mean of the best trial's reports at the same
    steps, the trial cannot win when ``m`` is worse than ``b`` by more than ``max(margin, 3 s sqrt(2 / n)) *
    |b|``, where s is the noise of a step relative to its mean, estimated from completed trials.

    Args:
        trial: The running trial.
        reports: Statistics of other trials.
        direction: Direction of the metric.
        margin: Minimum relative distance from the best at which a trial is stopped.
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
    finished = reports.at_step(step)
    running = [_report(t.intermediate_values, step) for t in pending if t.state == TrialState.RUNNING]
    running = [value for value in running if not math.isnan(value)]
    count = len(finished) + len(running) + 1
    if count < divisor:
        return False
    if direction == StudyDirection.MAXIMIZE:
        better = len(finished) - bisect_right(finished, mine) + sum(value > mine for value in running)
    else:
        better = bisect_left(finished, mine) + sum(value < mine for value in running)
    return better >= max(count // divisor, 1)


def _report(reports: Mapping[int, float], step: int) -> float:
    return reports.get(step, math.nan)


def _keep(cache: OrderedDict[K, V], key: K, value: V) -> None:
    cache[key] = value
    if len(cache) > _MAX_CACHED:
        cache.popitem(last=False)
