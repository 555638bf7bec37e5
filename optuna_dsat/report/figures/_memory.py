"""Peak memory predicted by the memory model, and measured peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optuna_dsat.config.structures import Structure
from optuna_dsat.report.figures._source import Source, view_of
from optuna_dsat.report.figures._style import NEUTRAL, WARNING, Palette, empty_figure, lay_out, new_figure
from optuna_dsat.report.view import StudyView
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH
from optuna_dsat.words import bytes_in_words, share_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

PREDICTED_AS_MEASURED = "predicted = measured"
_TITLE = "Peak memory per rank: predicted at proposal, and measured"
_GIB = 2**30


def plot_memory(study: Source) -> go.Figure:
    """Plot the measured peak memory per rank (GiB) over the peak that was predicted when the trial was proposed.

    Predictions come from the memory model, corrected by the launches finished by then; for ``guided``, its posterior.

    Args:
        study: A study that optuna-dsat made.

    Raises:
        UsageError: If it did not make it.
    """
    view = view_of(study)
    x, y = "predicted at proposal (GiB)", "measured (GiB)"
    points = _points(view)
    if not points:
        why = "No trial has both a predicted and a measured peak."
        if view.profiled is None:
            why = "The profile launch has not ended yet: without a profile nothing is predicted."
        return empty_figure(why, title=_TITLE, x=x, y=y)
    if len(points) == 1:
        return empty_figure("One trial has both a predicted and a measured peak.", title=_TITLE, x=x, y=y)
    figure = new_figure()
    palette = Palette(point.words for point in points)
    for words in dict.fromkeys(point.words for point in points):
        members = [point for point in points if point.words == words]
        figure.add_scatter(
            x=[point.predicted / _GIB for point in members],
            y=[point.measured / _GIB for point in members],
            mode="markers",
            name=words,
            marker={"color": palette[words], "symbol": palette.symbol(words), "size": 9},
            hovertext=[point.hover for point in members],
            hoverinfo="text",
        )
    high = max(max(p.predicted, p.measured) for p in points) / _GIB * 1.05
    line = {"color": NEUTRAL, "dash": "dash", "width": 1}
    ends = [0, high]
    figure.add_scatter(x=ends, y=ends, mode="lines", name=PREDICTED_AS_MEASURED, line=line, hoverinfo="skip")
    limit = 0.0 if view.profiled is None else view.profiled.profile.device_memory_bytes / _GIB
    if 0 < limit <= 2 * high:
        figure.add_hline(
            y=limit,
            line={"color": WARNING, "width": 1},
            annotation_text="device memory",
            annotation_position="top left",
        )
    error = statistics.median(abs(p.measured - p.predicted) / p.measured for p in points)
    note = f"half of the {len(points)} predictions were within {share_in_words(error)} of the measured peak"
    lay_out(figure, title=_TITLE, note=note, x=x, y=y)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


@dataclass(frozen=True, kw_only=True)
class _Point:
    words: str
    """The structure."""
    predicted: int
    measured: int
    """Bytes of the worst rank at the peak."""
    hover: str


def _points(view: StudyView) -> Sequence[_Point]:
    points = []
    for trial in view.trials:
        config, measured, predicted = (
            trial.user_attrs.get(name)
            for name in (attributes.CONFIG, attributes.PEAK_BYTES, attributes.PREDICTED_PEAK_BYTES)
        )
        if config is None or not measured or not predicted:
            continue
        words = Structure.of(config).words
        lines = [
            f"<b>{words}, micro-batch {config[MICRO_BATCH]}</b>",
            f"trial {trial.number}",
            f"predicted {bytes_in_words(predicted)}",
            f"measured {bytes_in_words(measured)} ({measured / predicted - 1:+.0%})",
        ]
        points.append(_Point(words=words, predicted=predicted, measured=measured, hover="<br>".join(lines)))
    return points
