"""What the live view shows: a search as its news tell it, without any terminal.

The view is drawn by a thread of its own while news come in. There is no lock, which the handler of Ctrl-C might find
held: what changes its size is copied in one step before it is looked through.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from optuna_dsat.metrics import direction_of
from optuna_dsat.outcome import Outcome
from optuna_dsat.study import progress

__all__ = ["Board", "Row"]

_REMEMBERED = 20
"""Launches whose durations tell how long the next ones take: later ones are more like those to come."""
_LEAST_TOLD = 2
"""Launches that must have ended before a time left is told."""


@dataclass(kw_only=True)
class Row:
    """A launch in flight."""

    name: str
    """Number of the trial, or what else is launched."""
    words: str
    """Its lineage and micro-batch in words."""
    since: float
    """Time at which it was launched, in the board's clock (s)."""
    last_step: int | None
    """Last step that it runs; None where that is not told."""
    step: int = 0
    samples_per_s: float | None = None
    peak_bytes: int = 0
    first_step_at: float | None = None


@dataclass(kw_only=True)
class Board:
    """A search, told by its news. Times are those of one monotonic clock, in seconds."""

    rows: dict[str, Row] = field(default_factory=dict)
    """Launches in flight, by name."""
    search: progress.SearchStarted | None = None
    began: float = 0.0
    """When the search began, in this process."""
    launched: int = 0
    """Launches that count against the budget."""
    best: progress.BestSoFar | None = None
    user_value: float | None = None
    """The metric of the user's own config."""
    memory_bytes: int = 0
    """What one rank has; 0 while that is not known."""
    finalists_done: int = 0
    ended_search: bool = False
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _startups: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def take(self, news: progress.ProgressEvent, now: float) -> None:
        """Take in a piece of news at time ``now``."""
        if isinstance(news, progress.ProfileStarted):
            self.rows = {
                "profile": Row(name="profile", words=f"{news.words}, micro-batch 1", since=now, last_step=None)
            }
        elif isinstance(news, progress.ProfileFinished):
            self.rows.pop("profile", None)
            self.memory_bytes = news.profile.device_memory_bytes
        elif isinstance(news, progress.SearchStarted):
            self.search, self.launched, self.began = news, news.launched, now
            self.best, self.user_value = news.best, news.user_value
        elif isinstance(news, progress.TrialStarted | progress.FinalistStarted):
            name = str(news.number)
            self.launched += isinstance(news, progress.TrialStarted) and news.attempt == 0
            self.ended_search |= isinstance(news, progress.FinalistStarted)
            self.rows[name] = Row(name=name, words=news.words, since=now, last_step=news.end_profile_step)
        elif isinstance(news, progress.TrialStepped):
            self._step(news, now)
        elif isinstance(news, progress.TrialFinished):
            self._finish(news, now)
        elif isinstance(news, progress.TrialDropped):
            self.rows.pop(str(news.number), None)
        elif isinstance(news, progress.FinalistMeasured):
            self.rows.pop(str(news.number), None)
            self.finalists_done += 1

    def _step(self, news: progress.TrialStepped, now: float) -> None:
        row = self.rows.get(str(news.number))
        if row is None:
            return
        row.step, row.samples_per_s, row.peak_bytes = news.step, news.samples_per_s, news.peak_bytes
        if row.first_step_at is None:
            row.first_step_at = now

    def _finish(self, news: progress.TrialFinished, now: float) -> None:
        row = self.rows.pop(str(news.number), None)
        self.launched = news.launched
        if row is not None:
            self._durations.append(now - row.since)
            if row.first_step_at is not None and news.outcome is Outcome.MEASURED:
                self._startups.append(row.first_step_at - row.since)
        self.best = news.best_so_far or self.best
        self.user_value = self.user_value if news.user_value is None else news.user_value

    @property
    def in_flight(self) -> tuple[Row, ...]:
        """Launches in flight."""
        return tuple(self.rows.values())

    @property
    def speed_up(self) -> float | None:
        """How many times as good as the user's own config the best is, None where either is missing."""
        if self.search is None or self.best is None or not self.user_value or not self.best.value:
            return None
        ratio = self.best.value / self.user_value
        return ratio if direction_of(self.search.metric) == "maximize" else 1 / ratio

    def against_best(self, row: Row) -> float | None:
        """Return by what share a launch's samples/s are above those of the best (below: negative), None if unknown."""
        if row.samples_per_s is None or self.best is None or not self.best.samples_per_s:
            return None
        return row.samples_per_s / self.best.samples_per_s - 1

    def left_s(self, now: float) -> float | None:
        """Return how long the rest takes at most, in seconds, if launches go on taking what the last ones took.

        None before that can be told. The search may end earlier: by --early-stopping, or because nothing is left that
        may win. The finalists' launches are counted in, with as many more steps as they run.
        """
        if self.search is None or len(self._durations) < _LEAST_TOLD:
            return None
        mean = statistics.fmean(tuple(self._durations))
        search_s = 0.0
        if not self.ended_search:
            begun = [max(0.0, mean - (now - row.since)) for row in self.in_flight]
            to_start = max(0, self.search.max_trials - self.launched)
            shared = (to_start * mean + sum(begun)) / self.search.side_by_side
            search_s = max(shared, mean if to_start else max(begun, default=0.0))
            if self.search.timeout_s is not None:
                search_s = min(search_s, max(0.0, self.began + self.search.timeout_s - now))
        return search_s + max(0, self.search.finalists - self.finalists_done) * self._finalist_s(mean)

    def _finalist_s(self, mean: float) -> float:
        """Return how long a finalist's launch takes."""
        startup = statistics.fmean(tuple(self._startups)) if self._startups else mean
        factor = 1.0 if self.search is None else self.search.finalist_steps
        return startup + max(0.0, mean - startup) * factor
