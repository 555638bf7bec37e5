"""Predicted and measured memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optuna.trial import FrozenTrial

from optuna_dsat.config.structures import Structure
from optuna_dsat.cost import memory
from optuna_dsat.report.figures._style import NEUTRAL, WARNING, Palette, empty_figure, lay_out
from optuna_dsat.study.profile import Profiled
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH
from optuna_dsat.words import bytes_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["PREDICTED_AS_MEASURED", "memory_figure"]

PREDICTED_AS_MEASURED = "predicted = measured"

_MOMENTS = {
    "forward": "peak at the end of the forward pass",
    "backward": "peak at the end of the backward pass",
    "convert": "peak when the gradients are converted",
    "step": "peak in the optimizer step",
}
_GIB = 2**30


def memory_figure(trials: Sequence[FrozenTrial], *, spec: StudySpec, profiled: Profiled) -> go.Figure:
    """Return the measured peak memory per rank over the uncorrected prediction.

    Args:
        trials: Trials with a config; those without a measured peak are left out.
        spec: The study.
        profiled: The profile of the script.
    """
    title = "Peak memory per rank, predicted (uncorrected) and measured"
    points = _memory_points(trials, spec, profiled)
    if not points:
        return empty_figure("Nothing has been measured yet.", title=title, x="predicted (GiB)", y="measured (GiB)")
    import plotly.graph_objects as go

    figure = go.Figure()
    palette = Palette(point.words for point in points)
    for words in dict.fromkeys(point.words for point in points):
        own = [point for point in points if point.words == words]
        figure.add_trace(
            go.Scatter(
                x=[point.predicted / _GIB for point in own],
                y=[point.measured / _GIB for point in own],
                mode="markers",
                name=words,
                marker={"color": palette[words], "symbol": palette.symbol(words), "size": 9},
                hovertext=[point.hover for point in own],
                hoverinfo="text",
            )
        )
    _add_guides(figure, points, limit=profiled.profile.device_memory_bytes / _GIB)
    error = statistics.median(abs(p.measured - p.predicted) / p.measured for p in points)
    note = f"half of the {len(points)} predictions are within {error:.0%} of what was measured"
    lay_out(figure, title=title, note=note, x="predicted (GiB)", y="measured (GiB)")
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _add_guides(figure: go.Figure, points: Sequence[_MemoryPoint], *, limit: float) -> None:
    """Draw the line of exact predictions, and the device's memory (GiB) if it is at most twice the largest value."""
    import plotly.graph_objects as go

    high = max(max(p.predicted, p.measured) for p in points) / _GIB * 1.05
    figure.add_trace(
        go.Scatter(
            x=[0, high],
            y=[0, high],
            mode="lines",
            name=PREDICTED_AS_MEASURED,
            line={"color": NEUTRAL, "dash": "dash", "width": 1},
            hoverinfo="skip",
        )
    )
    if limit <= 2 * high:
        figure.add_hline(
            y=limit,
            line={"color": WARNING, "width": 1},
            annotation_text="device memory",
            annotation_position="top left",
        )


@dataclass(frozen=True, kw_only=True)
class _MemoryPoint:
    words: str
    """The structure."""
    predicted: int
    """Bytes of one rank at the peak."""
    measured: int
    """Likewise."""
    hover: str


def _memory_points(trials: Sequence[FrozenTrial], spec: StudySpec, profiled: Profiled) -> list[_MemoryPoint]:
    hardware = hardware_of(spec, profiled)
    points = []
    for trial in trials:
        config, measured = trial.user_attrs.get(attributes.CONFIG), trial.user_attrs.get(attributes.PEAK_BYTES, 0)
        if config is None or measured <= 0:
            continue
        micro_batch = int(config[MICRO_BATCH])
        estimate = memory.estimate(profiled.profile, config, micro_batch=micro_batch, hardware=hardware)
        predicted = estimate.device_bytes
        words = Structure.of(config).words
        lines = [
            f"<b>{words}, micro-batch {micro_batch}</b>",
            f"trial {trial.number}",
            f"predicted {bytes_in_words(predicted)}, {_MOMENTS.get(estimate.moment, estimate.moment)}",
            f"measured {bytes_in_words(measured)} ({(measured - predicted) / predicted:+.0%})",
        ]
        points.append(_MemoryPoint(words=words, predicted=predicted, measured=int(measured), hover="<br>".join(lines)))
    return points
