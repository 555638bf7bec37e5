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
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.report.facts import Training
from optuna_dsat.report.launch_files import Links
from optuna_dsat.report.page import page_values
from optuna_dsat.report.template import page_text
from optuna_dsat.report.view import StudyView, end_reason_of, read_view
from optuna_dsat.store import Store
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.live_state import LaunchInFlight, LiveState, read_states, time_left_in_words
from optuna_dsat.study.stored import attributes_of, record_of
from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words, duration_in_words, metric_in_words, things_in_words

_LEAST_PAUSE_S = 2.0
"""Minimum time between two renderings, in seconds ..."""
_SHARE = 0.1
"""... which take at most this share of a core, because launches are being measured at the same time."""


class LiveStudy:
    """A study of a store, rendered again when it has changed; raises as ``read_view``. Thread-safe."""

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
        """Return the version of the study's part of the page, and the study's current state as HTML."""
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
        """Return the whole page."""
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
        """Render the study's part of the page if it changed and that is not too soon; return whether it did."""
        if version == self._version or (self._html and time.monotonic() < self._render_after):
            return False
        began_s = time.thread_time()
        view, last = read_view(self._store, self._name), self._view
        known, before = (
            (item.spec, item.profiled, item.attributes.get(attributes.WARM_START)) for item in (view, last)
        )
        if known == before and "planner" in vars(last):
            vars(view)["planner"] = last.planner  # its table takes most of a rendering's time
        values = page_values(view, links=Links(view=view, page=None), training=Training())
        html = page_text("_study.html", title=self._name, **{**values, "has_figures": False})
        self._view, self._html, self._version = view, html, version
        took_s = time.thread_time() - began_s
        self._render_after = time.monotonic() + max(_LEAST_PAUSE_S, took_s / _SHARE)
        return True

    def _now_html(self, trials: Sequence[FrozenTrial], attrs: Mapping[str, Any]) -> str:
        view, now = self._view, time.time()
        states = read_states(self._store, self._name, now=now)
        rows = {name: row for state in states for name, row in state.rows.items()}
        running = [trial for trial in trials if trial.state is TrialState.RUNNING]
        rows |= {str(item.number): _row_of(view, item) for item in running if str(item.number) not in rows}
        ended = not rows and end_reason_of(attrs) is not None
        done = attributes.launches_used([trial for trial in trials if trial.state.is_finished()])
        words = "The search has ended."
        if not ended:
            again = len(Rounds.of(attrs).launches)
            words = _told(states, now=now, done=done, budget=view.spec.max_trials, running=len(rows), again=again)
        if not ended and not trials:
            words = "No trial has begun yet: the profile launch comes first."
        best = None if view.best is None else view.best.samples_per_s
        limit = 0 if view.profiled is None else view.profiled.profile.device_memory_bytes
        return page_text(
            "_now.html",
            title="",
            has_figures=False,
            told=words,
            phases=[f"{state.phase}, {duration_in_words(now - state.phase_since)}" for state in states if state.phase],
            done=done,
            budget=view.spec.max_trials,
            ended=ended,
            rows=[_cells(row, now=now, best=best, limit_bytes=limit) for row in rows.values()],
        )


def _row_of(view: StudyView, trial: FrozenTrial) -> LaunchInFlight:
    """Return a running trial of which no worker stores a state."""
    config, values = trial.user_attrs.get(attributes.CONFIG), trial.intermediate_values
    step = max(values, default=0)
    return LaunchInFlight(
        name=str(trial.number),
        words="being prepared" if config is None else config_in_words(config),
        since=time.time() if trial.datetime_start is None else trial.datetime_start.timestamp(),
        last_step=view.spec.end_profile_step,
        step=step,
        samples_per_s=values.get(step) if view.metric == "throughput" else None,
    )


def _cells(row: LaunchInFlight, *, now: float, best: float | None, limit_bytes: int) -> tuple[str, ...]:
    """Return the cells of a running launch: configuration, step, speed, speed relative to the best, memory, time."""
    speed, share = row.samples_per_s, row.against(best)
    return (
        row.name,
        row.words,
        row.doing,
        "" if speed is None else metric_in_words("throughput", speed),
        "" if share is None else f"{share:+.0%}",
        row.memory_in_words(limit_bytes),
        duration_in_words(max(0.0, now - row.since)),
    )


def _told(states: Sequence[LiveState], *, now: float, done: int, budget: int, running: int, again: int) -> str:
    """Return a sentence on the study's current state."""
    known = [left_s for state in states if (left_s := state.left_s(now)) is not None]
    left = f"; {time_left_in_words(max(known))}" if known else ""
    confirming = next((state for state in states if state.ended_search), None)
    if confirming is None and (running or not again):
        return f"{done} of {things_in_words(budget, 'trial')} done, {running or 'none is'} running{left}."
    of = f"{things_in_words(again, 'launch')} so far"
    if confirming is not None:
        so_far, expected = max(again, confirming.finalists_done), confirming.finalists
        least = f"{so_far} of at least {things_in_words(expected, 'launch')}"
        of = f"{least if expected >= so_far else things_in_words(so_far, 'launch')} done"
    return f"The search is over; finalists are measured again: {of}{left}."
