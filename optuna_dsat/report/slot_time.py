"""Use of the slots' time in a search.

A slot is a GPU, or a CPU rank, of a host. Between launches it is idle. A gap on all slots at once, much longer than a
launch, is a pause of the study, not idle time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optuna_dsat.store import StoredLaunch

_PAUSE_S = 60.0
"""Minimum length of a gap on all slots that counts as a pause, in seconds ..."""
_PAUSE_LAUNCHES = 5.0
"""... and in median launch durations; both must be exceeded."""
_MIN_GAP_S = 0.01
"""Shorter gaps are within the clock's error."""

_Time = tuple[float, float]
"""Start and end, as Unix times in seconds."""


@dataclass(frozen=True, kw_only=True)
class SlotTime:
    """Use of the time of all slots on which launches ran."""

    wall_s: float
    """Time from the start of the first launch to the end of the last, without pauses, in seconds."""
    busy_s: float
    """Slot-seconds of launches."""
    idle_s: float
    """Slot-seconds between launches."""


def account(launches: Sequence[StoredLaunch]) -> SlotTime:
    """Return the use of the slots' time, from the start of the first launch to the end of the last."""
    held: dict[tuple[str, int], list[_Time]] = {}
    reports = sorted((row.report for row in launches), key=lambda report: report.started_at)
    times = [(report.started_at, report.started_at + report.held_s) for report in reports]
    for report, time in zip(reports, times, strict=True):
        for device in report.devices:
            held.setdefault((report.host, device), []).append(time)
    periods = list(_periods(times))
    return SlotTime(
        wall_s=sum(end - start for start, end in periods),
        busy_s=sum(end - start for own in held.values() for start, end in own),
        idle_s=sum(_idle_s(own, period) for own in held.values() for period in periods),
    )


def _periods(times: Sequence[_Time]) -> Iterator[_Time]:
    """Yield the periods without a pause; ``times`` are those of all launches, by start."""
    if not times:
        return
    pause_s = max(_PAUSE_S, _PAUSE_LAUNCHES * statistics.median(end - start for start, end in times))
    begun, over = times[0]
    for start, end in times[1:]:
        if start - over > pause_s:
            yield begun, over
            begun = start
        over = max(over, end)
    yield begun, over


def _idle_s(held: Sequence[_Time], period: _Time) -> float:
    """Return the seconds of a period in which none of a slot's launches ran; ``held`` is sorted."""
    at, gaps = period[0], []
    for start, end in [*((start, end) for start, end in held if end > period[0] and start < period[1]), period[::-1]]:
        gaps.append(start - at)
        at = max(at, end)
    return sum(gap for gap in gaps if gap > _MIN_GAP_S)
