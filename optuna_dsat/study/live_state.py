"""What a search does at one moment, built from its progress events: what terminal and live page show.

The view is drawn by a thread of its own while events arrive. There is no lock, which the handler of Ctrl-C might find
held: a collection is copied in one step before it is iterated over.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from optuna_dsat.metrics import direction_of, speed_up
from optuna_dsat.outcome import Outcome
from optuna_dsat.study import progress
from optuna_dsat.words import duration_in_words

__all__ = ["LaunchInFlight", "LiveState", "time_left_in_words"]

_PROFILE = "profile"
"""Name of a profile's launch."""
_WINDOW = 20
"""Latest launches whose durations predict the next ones: later launches are more like those to come."""
_MIN_LAUNCHES = 2
"""Launches that must have ended before the time left is estimated."""


@dataclass(kw_only=True)
class LaunchInFlight:
    """A launch in flight."""

    name: str
    """Number of the trial, or ``profile``."""
    words: str
    """Its configuration in words."""
    since: float
    """Time of the launch, in seconds of the state's clock."""
    last_step: int | None
    """Last step that it runs; None if not known."""
    phase: str = "starting"
    """What it does before its first step ends."""
    step: int = 0
    """Last step that ended; 0 before the first."""
    samples_per_s: float | None = None
    """Over all ranks; None before the first step."""
    peak_bytes: int = 0
    """Peak device memory of the worst rank; 0 if not known."""
    first_step_at: float | None = None
    """End of the first step, in seconds of the state's clock; None before it."""

    @property
    def doing(self) -> str:
        """The step that runs, or what it does before the first one has ended."""
        if not self.step:
            return self.phase
        if self.last_step is None:
            return f"step {self.step + 1}"
        return f"step {self.step + 1} of {self.last_step}" if self.step < self.last_step else "ending"


@dataclass(kw_only=True)
class LiveState:
    """The state of a search, as its events tell it. Times are those of one monotonic clock, in seconds."""

    rows: dict[str, LaunchInFlight] = field(default_factory=dict)
    """Launches in flight, by name."""
    search: progress.SearchStarted | None = None
    began: float = 0.0
    """Start of the search in this process."""
    launched: int = 0
    """Launches that count against the budget."""
    best: progress.BestSoFar | None = None
    """None before anything was measured."""
    user_value: float | None = None
    """The metric of the user's own config; None if it was not measured."""
    memory_bytes: int = 0
    """Device memory per rank; 0 while it is not known."""
    finalists: int = 0
    """Launches that the rounds of finalists are expected to take; at least as many, once they have begun."""
    finalists_done: int = 0
    """Launches of finalists that are over."""
    ended_search: bool = False
    """Whether finalists are being measured again."""
    elsewhere: int = 0
    """Launches of other workers that were running when the last one ended here."""
    phase: str = ""
    """What the search itself does that may take long; empty for nothing."""
    phase_since: float = 0.0
    """Begin of the phase, in seconds of the state's clock."""
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _startups: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def apply(self, event: progress.ProgressEvent, now: float) -> None:
        """Update the state by an event that arrives at time ``now``."""
        if isinstance(event, progress.ProfileStarted):
            self.rows = {
                _PROFILE: LaunchInFlight(
                    name=_PROFILE, words=f"{event.words}, micro-batch {event.micro_batch}", since=now, last_step=None
                )
            }
        elif isinstance(event, progress.ProfileFinished):
            self.rows.pop(_PROFILE, None)
            self.memory_bytes = event.profile.device_memory_bytes
        elif isinstance(event, progress.SearchStarted):
            self.search, self.launched, self.began = event, event.launched, now
            self.best, self.user_value, self.finalists = event.best, event.user_value, event.finalists
        elif isinstance(event, progress.TrialStarted | progress.FinalistStarted):
            name = str(event.number)
            self.launched += isinstance(event, progress.TrialStarted) and event.attempt == 0
            if isinstance(event, progress.FinalistStarted):
                self.ended_search, self.finalists = True, event.launches or self.finalists
                self.finalists_done = self.finalists_done if event.done is None else event.done
            self.rows[name] = LaunchInFlight(name=name, words=event.words, since=now, last_step=event.end_profile_step)
        elif isinstance(event, progress.Phase):
            self.phase, self.phase_since = event.words, now
        elif isinstance(event, progress.TrialPhase):
            self._enter(event)
        elif isinstance(event, progress.TrialStepped):
            self._step(event, now)
        elif isinstance(event, progress.TrialFinished):
            self._finish(event, now)
        elif isinstance(event, progress.TrialDropped):
            self.rows.pop(str(event.number), None)
        elif isinstance(event, progress.FinalistMeasured):
            self.rows.pop(str(event.number), None)
            self.finalists_done += 1

    def _enter(self, event: progress.TrialPhase) -> None:
        row = self.rows.get(_PROFILE if event.number is None else str(event.number))
        if row is not None:
            row.phase = event.words

    def _step(self, event: progress.TrialStepped, now: float) -> None:
        row = self.rows.get(str(event.number))
        if row is None:
            return
        row.step, row.samples_per_s, row.peak_bytes = event.step, event.samples_per_s, event.peak_bytes
        if row.first_step_at is None:
            row.first_step_at = now

    def _finish(self, event: progress.TrialFinished, now: float) -> None:
        row = self.rows.pop(str(event.number), None)
        self.launched = event.launched
        self.elsewhere = max(0, event.running - len(self.rows))
        if row is not None:
            self._durations.append(now - row.since)
            if row.first_step_at is not None and event.outcome is Outcome.MEASURED:
                self._startups.append(row.first_step_at - row.since)
        self.best = event.best_so_far or self.best
        self.user_value = self.user_value if event.user_value is None else event.user_value

    @property
    def done(self) -> int:
        """Launches of the search that are over, of those that count against the budget."""
        running = 0 if self.ended_search else len(self.in_flight)
        return max(0, self.launched - running - self.elsewhere)

    @property
    def in_flight(self) -> tuple[LaunchInFlight, ...]:
        """Launches in flight."""
        return tuple(self.rows.values())

    @property
    def speed_up(self) -> float | None:
        """How many times as good as the user's own config the best is; None if either is missing."""
        if self.search is None or self.best is None:
            return None
        maximize = direction_of(self.search.metric) == "maximize"
        return speed_up(self.best.value, self.user_value, maximize=maximize)

    def against_best(self, row: LaunchInFlight) -> float | None:
        """Return the relative difference of a launch's samples/s to those of the best; None if either is unknown."""
        if row.samples_per_s is None or self.best is None or self.best.speed is None:
            return None
        return row.samples_per_s / self.best.speed.samples_per_s - 1

    def left_s(self, now: float) -> float | None:
        """Return an upper estimate of the time left, in seconds, from the durations of the latest launches.

        None before two launches have ended. The search may end earlier: by --early-stopping, or because nothing is left
        that may win. The finalists' launches are included, with the larger number of steps that they run.
        """
        if self.search is None or len(self._durations) < _MIN_LAUNCHES:
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
        return search_s + max(0, self.finalists - self.finalists_done) * self._finalist_s(mean)

    def _finalist_s(self, mean: float) -> float:
        """Return the predicted duration of a finalist's launch, in seconds, from the mean of a trial's."""
        startup = statistics.fmean(tuple(self._startups)) if self._startups else mean
        factor = 1.0 if self.search is None else self.search.finalist_steps
        return startup + max(0.0, mean - startup) * factor


def time_left_in_words(left_s: float | None) -> str:
    """Return the time left, rounded up: to minutes, 5 minutes or a quarter of an hour."""
    if left_s is None:
        return "the time left is not known yet"
    if left_s < 60:
        return "less than a minute left"
    minutes = -(-left_s // 60)
    step = 1 if minutes < 10 else 5 if minutes < 60 else 15
    return f"at most about {duration_in_words(-(-minutes // step) * step * 60).removesuffix(' 0 s')} left"
