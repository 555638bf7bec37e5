"""Current state of a search, built from its progress events, for the terminal and the live page.

Optuna's tables contain running trials. Launches of the profile and of finalists, phases, speeds and peaks are recorded
only here: each worker keeps its state among the study's system attributes.

A separate thread draws the view while events arrive. There is no lock, as the handler of Ctrl-C could deadlock on it:
collections are copied atomically before iteration.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from optuna.storages import BaseStorage
from pydantic import TypeAdapter

from optuna_dsat.errors import StorageError
from optuna_dsat.metrics import direction_of, speed_up
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store
from optuna_dsat.store.leases import Worker, this_worker
from optuna_dsat.study import progress
from optuna_dsat.words import bytes_in_words, duration_in_words

_PROFILE = "profile"
"""Name of the profile launch."""
_WINDOW = 20
"""Number of latest launches whose durations predict the next launches: recent launches are the most similar."""
_MIN_LAUNCHES = 2
"""Minimum number of finished launches for an estimate of the time left."""
_PREFIX = "dsat_live:"
"""Prefix of the keys of notes; the worker's name follows."""
_PAUSE_S = 1.0
"""Minimum seconds between two notes on the steps of launches."""
_OLDEST_S = 900.0
"""Age at which the note of a worker on another machine expires, as its death cannot be detected."""


@dataclass(kw_only=True)
class LaunchInFlight:
    """A running launch."""

    name: str
    """Number of the trial, or ``profile``."""
    words: str
    """Description of its configuration."""
    since: float
    """Time of the launch, in seconds of the state's clock."""
    last_step: int | None
    """Last step that it runs; None if not known."""
    phase: str = "starting"
    """Phase before its first step ends."""
    step: int = 0
    """Last step that ended; 0 before the first."""
    samples_per_s: float | None = None
    """Over all ranks; None before the first step."""
    peak_bytes: int = 0
    """Peak device memory of the worst rank; 0 if not known."""
    first_step_at: float | None = None
    """End of the first step, in seconds of the state's clock; None before it."""

    def against(self, samples_per_s: float | None) -> float | None:
        """Return the relative difference in samples/s to another speed; None if either is unknown."""
        return None if not samples_per_s or self.samples_per_s is None else self.samples_per_s / samples_per_s - 1

    def memory_in_words(self, limit_bytes: int) -> str:
        """Return the peak memory and its limit, where known."""
        peak = bytes_in_words(self.peak_bytes) if self.peak_bytes > 0 else ""
        return f"{peak} of {bytes_in_words(limit_bytes)}" if peak and limit_bytes > 0 else peak

    @property
    def doing(self) -> str:
        """The current step, or the phase before the first step has ended."""
        if not self.step:
            return self.phase
        if self.last_step is None:
            return f"step {self.step + 1}"
        return f"step {self.step + 1} of {self.last_step}" if self.step < self.last_step else "ending"


@dataclass(kw_only=True)
class LiveState:
    """The state of a worker's search, according to its events. Times are seconds of one clock; stored as Unix times."""

    worker: Worker | None = None
    """The worker; None unless the state is stored."""
    noted_at: float = 0.0
    """Time at which the state was stored."""
    rows: dict[str, LaunchInFlight] = field(default_factory=dict)
    """Running launches by name."""
    search: progress.SearchStarted | None = None
    began: float = 0.0
    """Start of the search in this process."""
    launched: int = 0
    """Launches that count against the budget."""
    best: progress.BestSoFar | None = None
    """None before anything was measured."""
    user_value: float | None = None
    """The metric of the user's config; None if it was not measured."""
    memory_bytes: int = 0
    """Device memory per rank; 0 while it is not known."""
    finalists: int = 0
    """Expected number of launches in rounds of finalists; a lower bound once the rounds have started."""
    finalists_done: int = 0
    """Finished launches of finalists."""
    ended_search: bool = False
    """Whether finalists are being measured again."""
    elsewhere: int = 0
    """Launches of other workers that were running when the last launch ended here."""
    phase: str = ""
    """Long-running phase of the search outside launches; empty for none."""
    phase_since: float = 0.0
    """Start of the phase, in seconds of the state's clock."""
    durations: tuple[float, ...] = ()
    """Durations of the latest launches."""
    startups: tuple[float, ...] = ()
    """Times from the start of the latest launches to the end of their first step."""

    def apply(self, event: progress.ProgressEvent, now: float) -> None:
        """Update the state with an event that arrives at time ``now``."""
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
            if (row := self.rows.get(_PROFILE if event.number is None else str(event.number))) is not None:
                row.phase = event.words
        elif isinstance(event, progress.TrialStepped):
            self._step(event, now)
        elif isinstance(event, progress.TrialFinished):
            self._finish(event, now)
        elif isinstance(event, progress.TrialDropped):
            self.rows.pop(str(event.number), None)
        elif isinstance(event, progress.FinalistMeasured):
            self.rows.pop(str(event.number), None)
            self.finalists_done += 1

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
            self.durations = (*self.durations, now - row.since)[-_WINDOW:]
            if row.first_step_at is not None and event.outcome is Outcome.MEASURED:
                self.startups = (*self.startups, row.first_step_at - row.since)[-_WINDOW:]
        self.best = event.best_so_far or self.best
        self.user_value = self.user_value if event.user_value is None else event.user_value

    @property
    def done(self) -> int:
        """Number of finished launches of the search that count against the budget."""
        running = 0 if self.ended_search else len(self.in_flight)
        return max(0, self.launched - running - self.elsewhere)

    @property
    def in_flight(self) -> tuple[LaunchInFlight, ...]:
        """Running launches."""
        return tuple(self.rows.values())

    @property
    def speed_up(self) -> float | None:
        """Ratio of the best config to the user's config; None if either is missing."""
        if self.search is None or self.best is None:
            return None
        maximize = direction_of(self.search.metric) == "maximize"
        return speed_up(self.best.speed.value, self.user_value, maximize=maximize)

    def counts(self, now: float) -> bool:
        """Whether a stored state is not empty and its worker is not known to have ended."""
        if self.worker is None or not (self.rows or self.phase):
            return False
        here = self.worker.machine == this_worker().machine
        return not self.worker.is_dead() if here else now - self.noted_at < _OLDEST_S

    def left_s(self, now: float) -> float | None:
        """Return an upper estimate of the time left, in seconds, from the durations of the latest launches.

        None before two launches have ended. The search may end earlier: by --early-stopping, or because no remaining
        config can win. Launches of finalists, which run more steps, are included.
        """
        if self.search is None or len(self.durations) < _MIN_LAUNCHES:
            return None
        mean = statistics.fmean(self.durations)
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
        """Return the predicted duration of a finalist's launch, in seconds, from a trial's mean duration."""
        startup = statistics.fmean(self.startups) if self.startups else mean
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


class LiveNotes:
    """An observer that forwards events and notes this worker's state within ``kept_in``, steps once a second."""

    def __init__(self, observer: progress.Observer, *, study: str, clock: Callable[[], float] = time.time) -> None:
        self._observer = observer
        self._storage: BaseStorage | None = None
        self._study = study
        self._study_id: int | None = None
        self._clock = clock
        self._worker = this_worker()
        self._state = LiveState()
        self._last: dict[str, Any] | None = None
        """The latest note as stored."""

    def __call__(self, event: progress.ProgressEvent) -> None:
        """Forward an event and note its changes."""
        self._observer(event)
        now = self._clock()
        self._state.apply(event, now)
        recent = self._last is not None and now - self._last["noted_at"] < _PAUSE_S
        if not (recent and isinstance(event, progress.TrialStepped)):
            self._note(now)

    @contextmanager
    def kept_in(self, store: Store) -> Iterator[None]:
        """Note events of this block in a store, and at its end that this worker is idle."""
        self._storage = store.storage
        try:
            yield
        except StorageError:
            self._storage = None  # it has failed for long enough
            raise
        finally:
            self._state = LiveState()
            with suppress(StorageError):
                self._note(self._clock())
            self._storage = None

    def _note(self, now: float) -> None:
        state = self._state
        if self._storage is None or (self._last is None and not state.rows and not state.phase):
            return
        record = asdict(replace(state, worker=self._worker, noted_at=now))
        if self._last is not None and record | {"noted_at": self._last["noted_at"]} == self._last:
            return
        try:
            if self._study_id is None:
                self._study_id = self._storage.get_study_id_from_name(self._study)
            self._storage.set_study_system_attr(self._study_id, f"{_PREFIX}{self._worker.name}", record)
        except KeyError:
            return  # not created yet, or deleted meanwhile
        self._last = record


def read_states(store: Store, study: str, *, now: float) -> list[LiveState]:
    """Return the states of a study's active workers; states that this version cannot read are skipped."""
    result = []
    attrs = store.storage.get_study_system_attrs(store.storage.get_study_id_from_name(study))
    for key, record in attrs.items():
        if key.startswith(_PREFIX):
            with suppress(ValueError):
                result.append(_STORED.validate_python(record))
    return sorted((note for note in result if note.counts(now)), key=lambda note: note.noted_at)


_STORED = TypeAdapter(LiveState)
