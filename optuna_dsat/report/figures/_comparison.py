"""Several studies side by side: their results and their progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optuna_dsat.escape.html import figure_text
from optuna_dsat.report.figures._style import NEUTRAL, Measure, Palette, empty_figure, lay_out, new_figure, wrapped
from optuna_dsat.words import duration_in_words, metric_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

_RATE = "throughput"
"""The compared metric, which every study has, also if it optimises another metric."""
_MOST_LINES = 4
"""Maximum lines of a study's name next to its bars; the table and the bars' hover text contain the full name."""
_FAR_APART = 30.0
"""Minimum ratio of two results at which the smaller would be invisible on a common axis from 0."""


@dataclass(frozen=True, kw_only=True)
class ComparedStudy:
    """Data of a study for the figures."""

    name: str
    best: float | None
    """Samples/s of the result; None if nothing was measured."""
    own: float | None
    """Samples/s of the user's own config; None if it was not measured."""
    course: tuple[tuple[float, float], ...]
    """(Seconds since the first launch, best samples/s so far) at each improvement and at the last launch."""


def comparison_figure(studies: Sequence[ComparedStudy]) -> go.Figure:
    """Return the samples/s of each study's result and of the user's own config."""
    title, x = "Results side by side", Measure(_RATE).title
    if not any(study.best for study in studies):
        return empty_figure("Nothing was measured in any of these studies.", title=title, x=x)
    rows = list(range(len(studies)))
    figure = new_figure()
    for name, colour, values in (
        ("your config", NEUTRAL, [study.own for study in studies]),
        ("the result", "#0072B2", [study.best for study in studies]),
    ):
        figure.add_bar(
            x=[value or 0.0 for value in values],
            y=rows,
            orientation="h",
            name=name,
            marker={"color": colour},
            text=[metric_in_words(_RATE, value) if value else "not measured" for value in values],
            textposition="auto",
            textangle=0,
            hovertext=[
                f"{figure_text(study.name)}, {name}: {metric_in_words(_RATE, value) if value else 'not measured'}"
                for study, value in zip(studies, values, strict=True)
            ],
            hoverinfo="text",
        )
    lay_out(figure, title=title, x=x, y="", barmode="group", height=150 + 70 * len(studies))
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(
        tickvals=rows,
        ticktext=[wrapped(study.name, most_lines=_MOST_LINES) for study in studies],
        range=[len(studies) - 0.5, -0.5],
    )
    return figure


def course_figure(studies: Sequence[ComparedStudy]) -> go.Figure:
    """Return the best samples/s so far of each study over the time of its search."""
    title, x, y = "Best so far over the time of the search", "minutes since the first launch", Measure(_RATE).title
    if not any(item.course for item in studies):
        return empty_figure("Nothing was measured in any of these studies.", title=title, x=x, y=y)
    names = [f"{place}: {item.name}" for place, item in enumerate(studies, start=1)]
    palette, figure = Palette(names), new_figure()
    for name, study in zip(names, studies, strict=True):
        if study.course:
            figure.add_scatter(
                x=[seconds / 60 for seconds, _ in study.course],
                y=[value for _, value in study.course],
                mode="lines+markers",
                name=figure_text(name),
                line={"color": palette[name], "shape": "hv", "width": 1.5},
                marker={"symbol": palette.symbol(name), "size": 7},
                hovertext=[
                    f"{figure_text(name)}<br>{metric_in_words(_RATE, value)} after {duration_in_words(seconds)}"
                    for seconds, value in study.course
                ],
                hoverinfo="text",
            )
    lay_out(figure, title=title, x=x, y=y, showlegend=True)
    ends = [item.course[-1][1] for item in studies if item.course]
    if max(ends) > _FAR_APART * min(ends):
        figure.update_yaxes(type="log")
    else:
        figure.update_yaxes(rangemode="tozero")
    return figure
