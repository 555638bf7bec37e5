"""Several studies side by side: their results and their progress."""

from __future__ import annotations

from collections.abc import Sequence
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


def comparison_figure(
    names: Sequence[str], *, best: Sequence[float | None], baseline: Sequence[float | None]
) -> go.Figure:
    """Return the samples/s of each study's result and of the user's own config; None where it was not measured."""
    title, x = "Results side by side", Measure(_RATE).title
    if not any(best):
        return empty_figure("Nothing was measured in any of these studies.", title=title, x=x)
    rows = list(range(len(names)))
    figure = new_figure()
    for what, colour, values in (("your config", NEUTRAL, baseline), ("the result", "#0072B2", best)):
        figure.add_bar(
            x=[value or 0.0 for value in values],
            y=rows,
            orientation="h",
            name=what,
            marker={"color": colour},
            text=[metric_in_words(_RATE, value) if value else "not measured" for value in values],
            textposition="auto",
            textangle=0,
            hovertext=[
                f"{figure_text(name)}, {what}: {metric_in_words(_RATE, value) if value else 'not measured'}"
                for name, value in zip(names, values, strict=True)
            ],
            hoverinfo="text",
        )
    lay_out(figure, title=title, x=x, y="", barmode="group", height=150 + 70 * len(names))
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(
        tickvals=rows,
        ticktext=[wrapped(name, most_lines=_MOST_LINES) for name in names],
        range=[len(names) - 0.5, -0.5],
    )
    return figure


def course_figure(studies: Sequence[str], courses: Sequence[Sequence[tuple[float, float]]]) -> go.Figure:
    """Return the best samples/s so far of each study over the time of its search.

    A course has (seconds since the first launch, best samples/s so far) at each improvement and at the last launch.
    """
    title, x, y = "Best so far over the time of the search", "minutes since the first launch", Measure(_RATE).title
    if not any(courses):
        return empty_figure("Nothing was measured in any of these studies.", title=title, x=x, y=y)
    names = [f"{place}: {name}" for place, name in enumerate(studies, start=1)]
    palette, figure = Palette(names), new_figure()
    for name, course in zip(names, courses, strict=True):
        if course:
            figure.add_scatter(
                x=[seconds / 60 for seconds, _ in course],
                y=[value for _, value in course],
                mode="lines+markers",
                name=figure_text(name),
                line={"color": palette[name], "shape": "hv", "width": 1.5},
                marker={"symbol": palette.symbol(name), "size": 7},
                hovertext=[
                    f"{figure_text(name)}<br>{metric_in_words(_RATE, value)} after {duration_in_words(seconds)}"
                    for seconds, value in course
                ],
                hoverinfo="text",
            )
    lay_out(figure, title=title, x=x, y=y, showlegend=True)
    ends = [course[-1][1] for course in courses if course]
    if max(ends) > _FAR_APART * min(ends):
        figure.update_yaxes(type="log")
    else:
        figure.update_yaxes(rangemode="tozero")
    return figure
