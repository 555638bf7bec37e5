"""The finalists: configurations that were measured again with more steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optuna_dsat.report.figures._style import INK, NEUTRAL, Measure, empty_figure, lay_out, wrapped

if TYPE_CHECKING:
    import plotly.graph_objects as go
from optuna_dsat.words import things_in_words

__all__ = ["FinalistPoint", "finalists_figure"]


@dataclass(frozen=True, kw_only=True)
class FinalistPoint:
    """A configuration that was measured again."""

    words: str
    """Description of its configuration."""
    number: int
    searched: float
    """The metric in the search, measured on few steps."""
    value: float
    """The metric in the confirmation."""
    low: float
    """Lower end of the 95% confidence interval."""
    high: float
    steps: int
    """Counted steps of the confirmation."""
    rounds: int
    winner: bool
    user: bool
    """Whether it is the user's own config."""


def finalists_figure(points: Sequence[FinalistPoint], *, metric: str, why_none: str, device: str = "") -> go.Figure:
    """Return the finalists' metrics with 95% confidence intervals, next to their metrics in the search.

    Args:
        points: The finalists that could be measured, best first.
        metric: Name of the metric.
        why_none: The sentence to show without finalists.
        device: Device of a rank, ``cuda`` or ``cpu``; empty if unknown.
    """
    import plotly.graph_objects as go

    measure = Measure(metric, device)
    title, x = "Finalists, measured again with more steps", measure.title
    if not points:
        return empty_figure(why_none, title=title, x=x)
    scale, rows = measure.scale, list(range(len(points)))
    figure = go.Figure(
        [
            go.Scatter(
                x=[p.searched * scale for p in points],
                y=rows,
                mode="markers",
                name="in the search",
                marker={"symbol": "circle-open", "color": NEUTRAL, "size": 10},
                hovertext=[f"in the search: {measure.shown(p.searched)}" for p in points],
                hoverinfo="text",
            ),
            _confirmed(points, measure),
        ]
    )
    lay_out(figure, title=title, x=x, y="", height=170 + 50 * len(points))
    figure.update_xaxes(tickformat=measure.ticks)
    figure.update_yaxes(
        tickvals=rows,
        ticktext=[wrapped(p.words) + ("<br>(your own config)" if p.user else "") for p in points],
        range=[len(points) - 0.5, -0.5],
    )
    return figure


def _confirmed(points: Sequence[FinalistPoint], measure: Measure) -> go.Scatter:
    """Return the trace of the confirmed metrics with their intervals."""
    import plotly.graph_objects as go

    scale, rows = measure.scale, list(range(len(points)))
    return go.Scatter(
        x=[p.value * scale for p in points],
        y=rows,
        mode="markers",
        name="confirmed, with its 95% interval",
        marker={"symbol": ["star" if p.winner else "circle" for p in points], "color": INK, "size": 12},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [(p.high - p.value) * scale for p in points],
            "arrayminus": [(p.value - p.low) * scale for p in points],
            "color": INK,
            "thickness": 1.5,
        },
        hovertext=[
            f"<b>{p.words}</b><br>{measure.shown(p.value)}, 95% between {measure.shown(p.low)} and "
            f"{measure.shown(p.high)}<br>{things_in_words(p.steps, 'step')} in {things_in_words(p.rounds, 'round')}"
            for p in points
        ],
        hoverinfo="text",
    )
