"""The finalists: configurations that were measured again with more steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from optuna_dsat.report.figures._source import Source, history_of, measure_of, view_of
from optuna_dsat.report.figures._style import INK, NEUTRAL, Measure, empty_figure, lay_out, new_figure, wrapped
from optuna_dsat.report.view import StudyView
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words, things_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go


def plot_finalists(study: Source) -> go.Figure:
    """Plot the finalists, measured again with more steps, with their 95% confidence intervals.

    Args:
        study: A study that optuna-dsat made.

    Raises:
        UsageError: If it did not make it.
    """
    view = view_of(study)
    verdict = view.verdict
    finalists = (
        []
        if verdict is None
        else [verdict.in_rounds(contender.number) or contender for contender in verdict.contenders]
    )
    points = [finalist for finalist in finalists if view.rounds.failure(finalist.number) is None]
    points.sort(key=lambda item: -item.value if view.maximize else item.value)
    measure = measure_of(history_of(view))
    title, x = "Finalists, measured again with more steps", measure.title
    if not points:
        return empty_figure(_why_no_finalist(view), title=title, x=x)
    if len(points) == 1:
        return empty_figure("One configuration was measured again.", title=title, x=x)
    scale, rows = measure.scale, list(range(len(points)))
    figure = new_figure()
    figure.add_scatter(
        x=[p.searched_value * scale for p in points],
        y=rows,
        mode="markers",
        name="in the search",
        marker={"symbol": "circle-open", "color": NEUTRAL, "size": 10},
        hovertext=[f"in the search: {measure.shown(p.searched_value)}" for p in points],
        hoverinfo="text",
    )
    _add_rounds(figure, points, view.best, measure)
    lay_out(figure, title=title, x=x, y="", height=170 + 50 * len(points))
    figure.update_xaxes(tickformat=measure.ticks)
    figure.update_yaxes(
        tickvals=rows,
        ticktext=[wrapped(_words(p)) + ("<br>(your config)" if p.is_user_config else "") for p in points],
        range=[len(points) - 0.5, -0.5],
    )
    return figure


def _add_rounds(figure: go.Figure, points: Sequence[Measured], best: Measured | None, measure: Measure) -> None:
    """Add the metrics of the rounds with their intervals."""
    scale, rows = measure.scale, list(range(len(points)))
    symbols = ["star" if best is not None and p.number == best.number else "circle" for p in points]
    ends = [(p.interval.low or p.value, p.interval.high or p.value) for p in points]
    figure.add_scatter(
        x=[p.value * scale for p in points],
        y=rows,
        mode="markers",
        name="in rounds, with its 95% interval",
        marker={"symbol": symbols, "color": INK, "size": 12},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [(high - p.value) * scale for p, (_, high) in zip(points, ends, strict=True)],
            "arrayminus": [(p.value - low) * scale for p, (low, _) in zip(points, ends, strict=True)],
            "color": INK,
            "thickness": 1.5,
        },
        hovertext=[
            f"<b>{_words(p)}</b><br>{measure.shown(p.value)}"
            + (f", 95% CI {measure.shown(low)} to {measure.shown(high)}" if low < high else "")
            + f"<br>{things_in_words(p.steps, 'step')} in {things_in_words(p.rounds, 'round')}"
            for p, (low, high) in zip(points, ends, strict=True)
        ],
        hoverinfo="text",
    )


def _words(measured: Measured) -> str:
    return config_in_words(measured.trial.user_attrs[attributes.CONFIG])


def _why_no_finalist(view: StudyView) -> str:
    if view.spec.confirm == 0:
        return "Nothing is measured again in this study (--confirm 0)."
    if view.end_reason is not None:
        return "No finalist could be measured again."
    if view.is_fruitless:
        return "Nothing was measured that could be measured again."
    return "Finalists are measured again when the search has ended; it has not."
