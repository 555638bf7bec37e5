"""A study while it is searched: what runs now, and the report's page, read from the store whenever that has changed.

Optuna's tables contain the running trials. The progress of their launches, and of the profile's and the finalists'
launches, comes from their workers' live state (``optuna_dsat.study.live_state``).
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.report.launch_files import Links
from optuna_dsat.report.page import page_values
from optuna_dsat.report.template import page_text
from optuna_dsat.report.training import Training
from optuna_dsat.report.view import StudyView, end_reason_of, read_view
from optuna_dsat.store import Store
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.live_state import LaunchInFlight, LiveNote, read_notes, time_left_in_words
from optuna_dsat.study.stored import attributes_of, record_of
from optuna_dsat.trials import attributes
from optuna_dsat.words import bytes_in_words, config_in_words, duration_in_words, metric_in_words, things_in_words

__all__ = ["InFlight", "LiveStudy", "Now"]

_LEAST_PAUSE_S = 2.0
"""Minimum time between two renderings, in seconds ..."""
_SHARE = 0.1
"""... which take at most this share of a core, because launches are being measured at the same time."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A running launch."""

    name: str
    """Number of its trial; ``profile``."""
    words: str
    """Its configuration."""
    elapsed: str
    now: str
    """Current step, or the launch's phase before the end of the first step."""
    speed: str
    """Samples/s, or the metric of its steps so far; empty before the first."""
    to_best: str
    """Its speed relative to the best; empty if either is unknown."""
    memory: str
    """Peak memory of the fullest rank; empty before it is known."""


@dataclass(frozen=True, kw_only=True)
class Now:
    """State of a study at a point in time."""

    told: str
    """The state as a sentence."""
    phases: tuple[str, ...]
    """Current phases of the search itself that may take long."""
    done: int
    """Finished launches."""
    budget: int
    in_flight: tuple[InFlight, ...]
    ended: bool
    """Whether the search is over."""


class LiveStudy:
    """A study of a store, rendered again when it has changed. Thread-safe.

    Args:
        store: The study's store.
        name: The study.

    Raises:
        UsageError: If the study does not exist, or plotly is not installed.
        UnreadableStudyError: If it cannot be read.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._view = read_view(store, name)
        self._version = ""
        self._html = ""
        self._render_after = 0.0
        self._refresh(self._read()[0])

    @property
    def view(self) -> StudyView:
        """The study as last rendered."""
        return self._view

    def now(self) -> tuple[str, str]:
        """Return the version of the study's part of the page, and the study's current state as HTML.

        Raises:
            UsageError: If the study is gone.
            StorageError: If the database fails.
        """
        with self._lock:
            version, trials, attrs = self._read()
            if self._refresh(version):  # took a while: other launches may run now
                _, trials, attrs = self._read()
            return self._version, self._now_html(trials, attrs)

    def study(self) -> tuple[str, str]:
        """Return the version of the study's part of the page, and that part as HTML."""
        with self._lock:
            return self._version, self._html

    def page(self) -> str:
        """Return the whole page.

        Raises:
            UsageError: If the study is gone.
            StorageError: If the database fails.
        """
        _, now = self.now()
        from markupsafe import Markup

        with self._lock:
            return page_text(
                "live.html",
                title=self._name,
                has_figures=False,
                policy="",
                study=Markup(self._html),
                study_version=self._version,
                now=Markup(now),
            )

    def _read(self) -> tuple[str, Sequence[FrozenTrial], Mapping[str, Any]]:
        """Return the version of the study's part of the page as text, the trials, and the study's attributes."""
        record = record_of(self._store, self._name)
        trials = self._store.storage.get_all_trials(
            self._store.storage.get_study_id_from_name(self._name), deepcopy=False
        )
        attrs = attributes_of(self._store, self._name)
        ended = [trial.number for trial in trials if trial.state.is_finished()]
        running = [trial.number for trial in trials if trial.state is TrialState.RUNNING]
        seen = json.dumps([record.uuid, record.spec, ended, running, attrs], default=str, sort_keys=True)
        return hashlib.sha256(seen.encode()).hexdigest()[:16], trials, attrs

    def _refresh(self, version: str) -> bool:
        """Render the study's part of the page if it has changed and the last rendering is long enough ago.

        Returns:
            Whether it was rendered.
        """
        if version == self._version or (self._html and time.monotonic() < self._render_after):
            return False
        began_s = time.thread_time()
        view = read_view(self._store, self._name)
        values = page_values(
            view, links=Links(view=view, page=None), training=Training(), with_why=view.end_reason is not None
        )
        html = page_text("_study.html", title=self._name, **{**values, "has_figures": False})
        self._view, self._html, self._version = view, html, version
        took_s = time.thread_time() - began_s
        self._render_after = time.monotonic() + max(_LEAST_PAUSE_S, took_s / _SHARE)
        return True

    def _now_html(self, trials: Sequence[FrozenTrial], attrs: Mapping[str, Any]) -> str:
        return page_text("_now.html", title="", has_figures=False, now=self._state(trials, attrs))

    def _state(self, trials: Sequence[FrozenTrial], attrs: Mapping[str, Any]) -> Now:
        view = self._view
        now = time.time()
        notes = read_notes(self._store, self._name, now=now)
        running = [trial for trial in trials if trial.state is TrialState.RUNNING]
        numbers = {str(trial.number) for trial in running}
        noted = {row.name: row for note in notes for row in note.rows}
        best = None if view.best is None else view.best.samples_per_s
        flying = [_in_flight(view, trial, noted.get(str(trial.number)), best=best) for trial in running]
        beside = [_noted(view, row, now=now, best=best) for row in noted.values() if row.name not in numbers]
        ended = not flying and not beside and end_reason_of(attrs) is not None
        begun = attributes.launches_used(trials)
        return Now(
            told=_told(
                view,
                trials,
                attrs,
                notes,
                now=now,
                done=begun - len(flying),
                running=len(flying) + len(beside),
                ended=ended,
            ),
            phases=tuple(f"{one.phase}, {duration_in_words(now - one.phase_since)}" for one in notes if one.phase),
            done=begun - len(flying),
            budget=view.spec.max_trials,
            in_flight=(*beside, *flying),
            ended=ended,
        )


def _in_flight(view: StudyView, trial: FrozenTrial, noted: LaunchInFlight | None, *, best: float | None) -> InFlight:
    """Return a running trial, with its worker's live state of the launch if available.

    Args:
        view: The study.
        trial: The trial.
        noted: Live state from its worker; None if unknown.
        best: Samples/s of the best so far; None if nothing was measured.
    """
    config, values = trial.user_attrs.get(attributes.CONFIG), trial.intermediate_values
    step = max(values, default=None)
    seconds = None if trial.datetime_start is None else (datetime.now() - trial.datetime_start).total_seconds()
    elapsed = "" if seconds is None else duration_in_words(max(0.0, seconds))
    if noted is not None:
        return replace(_noted(view, noted, now=0.0, best=best), elapsed=elapsed)
    return InFlight(
        name=str(trial.number),
        words="being prepared" if config is None else config_in_words(config),
        elapsed=elapsed,
        now="starting" if step is None else f"step {step} of {view.spec.end_profile_step} has ended",
        speed="" if step is None else metric_in_words(view.metric, values[step], device=view.spec.device),
        to_best="",
        memory="",
    )


def _noted(view: StudyView, row: LaunchInFlight, *, now: float, best: float | None) -> InFlight:
    """Return a launch from its worker's live state."""
    limit = 0 if view.profiled is None else view.profiled.profile.device_memory_bytes
    peak = bytes_in_words(row.peak_bytes) if row.peak_bytes > 0 else ""
    rate = row.samples_per_s
    return InFlight(
        name=row.name,
        words=row.words,
        elapsed=duration_in_words(max(0.0, now - row.since)),
        now=row.doing,
        speed="" if rate is None else metric_in_words("throughput", rate),
        to_best="" if not rate or not best else f"{rate / best - 1:+.0%}",
        memory=f"{peak} of {bytes_in_words(limit)}" if peak and limit else peak,
    )


def _told(
    view: StudyView,
    trials: Sequence[FrozenTrial],
    attrs: Mapping[str, Any],
    notes: Sequence[LiveNote],
    *,
    now: float,
    done: int,
    running: int,
    ended: bool,
) -> str:
    """Return a sentence on the study's current state."""
    if ended:
        return "The search has ended."
    known = [max(0.0, one.left_s - (now - one.noted_at)) for one in notes if one.left_s is not None]
    left = f"; {time_left_in_words(max(known))}" if known else ""
    again = len(Rounds.of(attrs).launches)
    confirming = next((one for one in notes if one.confirming), None)
    if confirming is not None:
        so_far = max(again, confirming.finalists_done)
        of = things_in_words(so_far, "launch")
        if confirming.finalists >= so_far:
            of = f"{so_far} of at least {things_in_words(confirming.finalists, 'launch')}"
        return f"The search is over; finalists are measured again: {of} done{left}."
    if again and not running:
        return f"The search is over; finalists are measured again: {things_in_words(again, 'launch')} so far."
    if not trials:
        return "No trial has begun yet: the profile launch comes first."
    return f"{done} of {things_in_words(view.spec.max_trials, 'launch')} done, {running or 'none is'} running{left}."
