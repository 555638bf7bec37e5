"""What a search does at one moment, built from its progress events: what terminal and live page show.

The view is drawn by a thread of its own while events arrive. There is no lock, which the handler of Ctrl-C might find
held: a collection is copied in one step before it is iterated over.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from optuna.storages import BaseStorage

from optuna_dsat.errors import StorageError
from optuna_dsat.metrics import direction_of, speed_up
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store
from optuna_dsat.store.leases import Worker, this_worker
from optuna_dsat.study import progress
from optuna_dsat.words import duration_in_words

__all__ = ["LaunchInFlight", "LiveNote", "LiveNotes", "LiveState", "read_notes", "time_left_in_words"]

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


# What the launches of a worker do now, noted in the store for whoever looks on from another process.
#
# A trial in flight stands in Optuna's tables anyway; the profile's and the finalists' launches stand nowhere else
# before they have ended, nor do phases, speeds and peaks of any. Each worker has one note, among the study's system
# attributes.

_PREFIX = "dsat_live:"
"""Of the keys of notes; the worker's name follows."""
_PAUSE_S = 1.0
"""Least seconds between two notes on the steps of launches."""
_OLDEST_S = 900.0
"""Age at which the note of a worker on another machine, which cannot be seen to have died, no longer counts."""


@dataclass(frozen=True, kw_only=True)
class LiveNote:
    """What one worker does. Times are Unix times in seconds."""

    worker: Worker
    noted_at: float
    phase: str
    """What the search itself does that may take long; empty for nothing."""
    phase_since: float
    rows: tuple[LaunchInFlight, ...]
    """Its launches in flight."""
    confirming: bool
    """Whether finalists are being measured again."""
    finalists: int
    """Launches of the confirmation's first rounds."""
    finalists_done: int
    left_s: float | None = None
    """Upper estimate of the time left at ``noted_at``, in seconds (``LiveState.left_s``); None if not known."""

    def to_json(self) -> dict[str, Any]:
        """Return the input of ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LiveNote:
        """Build from the output of ``to_json``.

        Raises:
            ValueError: If it is not what this version writes.
        """
        try:
            rows = tuple(LaunchInFlight(**row) for row in record["rows"])
            return cls(**{**record, "worker": Worker(**record["worker"]), "rows": rows})
        except (TypeError, KeyError) as error:
            raise ValueError(f"The note {record!r} has not the fields of this version.") from error

    def counts(self, now: float) -> bool:
        """Whether it tells of anything, and its worker is not known to have ended."""
        if not self.rows and not self.phase:
            return False
        return now - self.noted_at < _OLDEST_S if self.worker.machine != this_worker().machine else (
            not self.worker.is_dead()
        )  # fmt: skip


class LiveNotes:
    """An observer that passes events on, and notes what this worker's launches do.

    Begins, phases and ends are noted at once, steps at most once a second; nothing is without a store (``kept_in``).

    Args:
        observer: Called first with each event.
        study: Name of the study.
        clock: Unix time in seconds.
    """

    def __init__(self, observer: progress.Observer, *, study: str, clock: Callable[[], float] = time.time) -> None:
        self._observer = observer
        self._storage: BaseStorage | None = None
        self._study = study
        self._clock = clock
        self._worker = this_worker()
        self._state = LiveState()
        self._last: dict[str, Any] | None = None
        """The latest note, as it is stored."""

    def __call__(self, event: progress.ProgressEvent) -> None:
        """Pass an event on and note what it changes."""
        self._observer(event)
        now = self._clock()
        self._state.apply(event, now)
        recent = self._last is not None and now - self._last["noted_at"] < _PAUSE_S
        if not (recent and isinstance(event, progress.TrialStepped)):
            self._note(now)

    @contextmanager
    def kept_in(self, store: Store) -> Iterator[None]:
        """Note in a store what happens in this block, and at its end that this worker does nothing any more."""
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
        if self._storage is None:
            return
        state = self._state
        note = LiveNote(
            worker=self._worker,
            noted_at=now,
            phase=state.phase,
            phase_since=state.phase_since,
            rows=state.in_flight,
            confirming=state.ended_search,
            finalists=state.finalists,
            finalists_done=state.finalists_done,
            left_s=state.left_s(now),
        )
        if self._last is None and not note.rows and not note.phase:
            return
        record = note.to_json()  # a copy of the rows, which the state changes
        if self._last is not None and record | {key: self._last[key] for key in ("noted_at", "left_s")} == self._last:
            return
        try:
            study_id = self._storage.get_study_id_from_name(self._study)
        except KeyError:
            return  # not created yet, or deleted meanwhile
        self._storage.set_study_system_attr(study_id, f"{_PREFIX}{self._worker.name}", record)
        self._last = record


def read_notes(store: Store, study: str, *, now: float) -> list[LiveNote]:
    """Return the notes of the workers of a study that are at work; what is none of this version's is left out.

    Args:
        store: Where the study lives.
        study: Its name.
        now: Unix time in seconds.
    """
    found = []
    attrs = store.storage.get_study_system_attrs(store.storage.get_study_id_from_name(study))
    for key, record in attrs.items():
        if key.startswith(_PREFIX) and isinstance(record, dict):
            try:
                found.append(LiveNote.from_json(record))
            except ValueError:
                continue
    return sorted((one for one in found if one.counts(now)), key=lambda one: one.noted_at)
