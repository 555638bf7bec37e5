"""Use of the slots' time in a search: pure functions over the launches of a study.

A slot is a GPU, or a CPU rank, of a host. A launch consists of start-up (until the first step boundary), steps, and
exit (until its devices are free again). Between launches a slot is idle. A gap on all slots at once, much longer than a
launch, is a pause of the study, not idle time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optuna_dsat.store import StoredLaunch

__all__ = ["PHASES", "Period", "Slot", "SlotTime", "Span", "account", "spans_of"]

PHASES = ("profile", "start-up", "steps", "exit", "finalists", "idle")
"""Uses of a slot's time, in display order."""

_PAUSE_S = 60.0
"""Minimum length of a gap on all slots that counts as a pause, in seconds ..."""
_PAUSE_LAUNCHES = 5.0
"""... and in median launch durations; both must be exceeded."""
_MIN_GAP_S = 0.01
"""Shorter gaps are within the clock's error."""

Slot = tuple[str, int]
"""Host and index of a GPU, or of a CPU rank."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A phase of a launch on all of its slots. Times are Unix times in seconds."""

    phase: str
    """One of ``PHASES``."""
    start: float
    end: float
    slots: tuple[Slot, ...]
    launch: StoredLaunch


@dataclass(frozen=True, kw_only=True)
class Period:
    """A period without a pause. Times are Unix times in seconds."""

    start: float
    end: float

    @property
    def length_s(self) -> float:
        """Length in seconds."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class SlotTime:
    """Use of the time of all slots on which launches ran."""

    slots: tuple[Slot, ...]
    periods: tuple[Period, ...]
    spans: tuple[Span, ...]
    """Phases of launches, by start."""
    idle: tuple[tuple[Slot, float, float], ...]
    """Slot, start and end of every gap between launches, within a period."""
    seconds: dict[str, float]
    """Phase -> slot-seconds. Their sum is ``len(slots)`` times the length of all periods, unless launches overlap."""

    @property
    def wall_s(self) -> float:
        """Length of all periods, in seconds."""
        return sum(period.length_s for period in self.periods)


def spans_of(row: StoredLaunch) -> tuple[Span, ...]:
    """Return the phases of a launch; launches of the profile and of finalists are a single span."""
    report = row.report
    slots = tuple((report.host, device) for device in report.devices)
    whole = {"profile": "profile", "confirm": "finalists"}.get(row.purpose)
    exit_s = min(report.exit_s, report.held_s)
    parts = [("start-up", report.held_s - report.measured_s - exit_s), ("steps", report.measured_s), ("exit", exit_s)]
    if whole is not None:
        parts = [(whole, report.held_s)]
    spans, at = [], report.started_at
    for phase, length in parts:
        if length > 0:
            spans.append(Span(phase=phase, start=at, end=at + length, slots=slots, launch=row))
            at += length
    return tuple(spans)


def account(launches: Sequence[StoredLaunch]) -> SlotTime:
    """Return the use of the slots' time, from the start of the first launch to the end of the last."""
    spans = sorted((span for row in launches for span in spans_of(row)), key=lambda span: span.start)
    slots = tuple(sorted({slot for span in spans for slot in span.slots}))
    periods = _periods(launches)
    seconds = dict.fromkeys(PHASES, 0.0)
    for span in spans:
        seconds[span.phase] += (span.end - span.start) * len(span.slots)
    idle = tuple(
        (slot, start, end)
        for slot in slots
        for start, end in _gaps([(s.start, s.end) for s in spans if slot in s.slots], periods)
    )
    seconds["idle"] = sum(end - start for _, start, end in idle)
    return SlotTime(slots=slots, periods=periods, spans=tuple(spans), idle=idle, seconds=seconds)


def _periods(launches: Sequence[StoredLaunch]) -> tuple[Period, ...]:
    times = sorted((row.report.started_at, row.report.started_at + row.report.held_s) for row in launches)
    if not times:
        return ()
    pause_s = max(_PAUSE_S, _PAUSE_LAUNCHES * statistics.median(end - start for start, end in times))
    result = [list(times[0])]
    for start, end in times[1:]:
        if start - result[-1][1] > pause_s:
            result.append([start, end])
        else:
            result[-1][1] = max(result[-1][1], end)
    return tuple(Period(start=start, end=end) for start, end in result)


def _gaps(busy: Iterable[tuple[float, float]], periods: Sequence[Period]) -> list[tuple[float, float]]:
    """Return the times within ``periods`` that no interval of ``busy`` covers."""
    ordered = sorted(busy)
    gaps = []
    for period in periods:
        at = period.start
        for start, end in ordered:
            if end <= period.start or start >= period.end:
                continue
            if start - at > _MIN_GAP_S:
                gaps.append((at, start))
            at = max(at, end)
        if period.end - at > _MIN_GAP_S:
            gaps.append((at, period.end))
    return gaps
