"""What the launches of a worker do now, noted in the store for whoever looks on from another process.

A trial in flight stands in Optuna's tables anyway; the profile's and the finalists' launches stand nowhere else before
they have ended, nor do phases, speeds and peaks of any. Each worker has one note, among the study's system attributes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from optuna.storages import BaseStorage

from optuna_dsat.errors import StorageError
from optuna_dsat.store import Store
from optuna_dsat.store.worker import Worker, this_worker
from optuna_dsat.study import progress
from optuna_dsat.study.live_state import LaunchInFlight, LiveState

__all__ = ["LiveNote", "LiveNotes", "read_notes"]

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
