"""The phases of each slot over the time of the search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from optuna_dsat.escape.html import figure_text
from optuna_dsat.report.figures._source import Source, view_of
from optuna_dsat.report.figures._style import NEUTRAL, PHASE_COLOURS, empty_figure, lay_out, new_figure
from optuna_dsat.report.slot_time import PHASES, Slot, SlotTime, Span, account
from optuna_dsat.words import duration_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["plot_timeline"]

_NO_LAUNCH = "No launch has ended yet, so there is no time to account for."
_UNITS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
"""(Minimum length of an axis in seconds, its unit in seconds, the unit's name)."""
_MANY_BARS = 4000
"""Number of bars above which only their centres have hover texts."""


def plot_timeline(study: Source) -> go.Figure:
    """Plot the activity of each GPU (CPU rank) over the time of the search: start-up, steps, exit, idle.

    Times are wall time; pauses of the study are cut out and marked. Running launches are not drawn.

    Args:
        study: A study that optuna-dsat made.

    Raises:
        UsageError: If it did not make it.
    """
    view = view_of(study)
    title = "Time line of the slots"
    spent = account(view.launches)
    if not spent.spans:
        return empty_figure(_NO_LAUNCH, title=title, x="time", y="slot")
    clock = _Clock(spent)
    rows = {slot: row for row, slot in enumerate(reversed(spent.slots))}
    figure = new_figure()
    width = max(5, min(20, 240 // len(rows)))
    bars = sum(len(span.slots) for span in spent.spans)
    for phase in PHASES:
        if phase == "idle":
            segments = [
                (slot, start, end, f"idle for {duration_in_words(end - start)}") for slot, start, end in spent.idle
            ]
        else:
            segments = [
                (slot, span.start, span.end, _hover(span))
                for span in spent.spans
                if span.phase == phase
                for slot in span.slots
            ]
        if segments:
            figure.add_trace(_bars(segments, phase, rows, clock, width=width, every_text=bars <= _MANY_BARS))
    for at in clock.cuts:
        figure.add_vline(x=at, line={"color": NEUTRAL, "dash": "dot", "width": 1}, annotation_text="pause")
    several = len({host for host, _ in rows}) > 1
    lay_out(
        figure,
        title=title,
        x=f"time of the search ({clock.unit})",
        y="",
        height=150 + max(3, len(rows)) * max(16, width + 8),
    )
    figure.update_yaxes(
        tickvals=list(rows.values()),
        ticktext=[_slot_words(slot, view.spec.device, several=several) for slot in rows],
        range=[-0.7, len(rows) - 0.3],
        showgrid=False,
        zeroline=False,
    )
    return figure


class _Clock:
    """Maps Unix times to the axis: from the first launch on, without pauses."""

    def __init__(self, spent: SlotTime) -> None:
        self._periods = spent.periods
        _, self._scale, self.unit = next(unit for unit in _UNITS if spent.wall_s >= unit[0])
        ends = [self(period.end) for period in self._periods[:-1]]
        self.cuts: list[float] = ends

    def __call__(self, time: float) -> float:
        before = 0.0
        for period in self._periods:
            if time <= period.end:
                return (before + max(0.0, time - period.start)) / self._scale
            before += period.length_s
        return before / self._scale


def _bars(
    segments: Iterable[tuple[Slot, float, float, str]],
    phase: str,
    rows: dict[Slot, int],
    clock: _Clock,
    *,
    width: int,
    every_text: bool,
) -> go.Scatter:
    """Return the bars of a phase as a single line with gaps: thousands of rectangles would make the page slow."""
    import plotly.graph_objects as go

    x: list[float | None] = []
    y: list[int | None] = []
    texts: list[str | None] = []
    for slot, start, end, text in segments:
        first, last, row = clock(start), clock(end), rows[slot]
        x += [first, (first + last) / 2, last, None]
        y += [row, row, row, None]
        texts += [text if every_text else None, text, text if every_text else None, None]
    return go.Scatter(
        x=x,
        y=y,
        mode="lines",
        name=phase,
        connectgaps=False,
        line={
            "color": PHASE_COLOURS[phase],
            "width": width if phase != "idle" else max(2, width // 4),
            "simplify": False,  # otherwise plotly.js drops launches shorter than a pixel
        },
        hovertext=texts,
        hoverinfo="text",
    )


def _hover(span: Span) -> str:
    report = span.launch.report
    outcome = report.outcome.value.replace("_", " ")
    return f"<b>{report.launch_id}</b>: {outcome}<br>{span.phase} {duration_in_words(span.end - span.start)}"


def _slot_words(slot: Slot, device: str, *, several: bool) -> str:
    host, index = slot
    words = f"{'GPU' if device == 'cuda' else 'rank'} {index}"
    return f"{figure_text(host)}<br>{words}" if several else words
