"""Memory as the search believed it to be, and as it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optuna_dsat.config.structures import Structure
from optuna_dsat.report.figures._style import NEUTRAL, WARNING, Palette, empty_figure, lay_out
from optuna_dsat.report.memory_belief import BelievedPeak
from optuna_dsat.report.view import StudyView
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH
from optuna_dsat.words import bytes_in_words, share_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["BELIEVED_AS_MEASURED", "FORMULAS_ALONE", "memory_figure"]

BELIEVED_AS_MEASURED = "believed = measured"
FORMULAS_ALONE = "formulas alone, uncorrected"
_TITLE = "Peak memory per rank: believed when launched, and measured"

_MOMENTS = {
    "forward": "peak at the end of the forward pass",
    "backward": "peak at the end of the backward pass",
    "convert": "peak when the gradients are converted",
    "step": "peak in the optimizer step",
}
_GIB = 2**30


def memory_figure(view: StudyView) -> go.Figure:
    """Return the measured peak memory per rank over what the search believed when it asked for the launch.

    Open marks are beliefs that no launch had corrected yet. What the formulas alone predict is a trace that the legend
    shows.
    """
    x, y = "believed when launched (GiB)", "measured (GiB)"
    if view.profiled is None:
        why = "The profile launch has not ended yet: without a profile nothing is predicted."
        return empty_figure(why, title=_TITLE, x=x, y=y)
    points = _memory_points(view)
    if not points:
        return empty_figure("Nothing has been measured yet.", title=_TITLE, x=x, y=y)
    import plotly.graph_objects as go

    figure = go.Figure()
    palette = Palette(point.words for point in points)
    for words in dict.fromkeys(point.words for point in points):
        own = [point for point in points if point.words == words]
        symbol = palette.symbol(words)
        figure.add_trace(
            go.Scatter(
                x=[point.peak.believed_bytes / _GIB for point in own],
                y=[point.measured / _GIB for point in own],
                mode="markers",
                name=words,
                marker={
                    "color": palette[words],
                    "symbol": [symbol if point.peak.corrected else f"{symbol}-open" for point in own],
                    "size": 9,
                },
                hovertext=[point.hover for point in own],
                hoverinfo="text",
            )
        )
    _add_formulas(figure, points)
    _add_guides(figure, points, limit=view.profiled.profile.device_memory_bytes / _GIB)
    lay_out(figure, title=_TITLE, note=_note(points), x=x, y=y)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _note(points: Sequence[_MemoryPoint]) -> str:
    """Return how far half of the beliefs, and of the formulas alone, were from what was measured."""

    def median(predicted: Callable[[BelievedPeak], int]) -> float:
        return statistics.median(abs(p.measured - predicted(p.peak)) / p.measured for p in points)

    whose = "the belief was" if len(points) == 1 else f"half of the {len(points)} beliefs were"
    believed, formula = median(lambda peak: peak.believed_bytes), median(lambda peak: peak.formula_bytes)
    return (
        f"{whose} within {share_in_words(believed)} of what was measured, "
        f"of the formulas alone within {share_in_words(formula)}"
    )


def _add_formulas(figure: go.Figure, points: Sequence[_MemoryPoint]) -> None:
    """Add what the formulas alone predict, hidden until the legend's entry is clicked."""
    import plotly.graph_objects as go

    figure.add_trace(
        go.Scatter(
            x=[point.peak.formula_bytes / _GIB for point in points],
            y=[point.measured / _GIB for point in points],
            mode="markers",
            name=FORMULAS_ALONE,
            visible="legendonly",
            marker={"color": NEUTRAL, "symbol": "x-thin-open", "size": 8},
            hovertext=[point.hover for point in points],
            hoverinfo="text",
        )
    )


def _add_guides(figure: go.Figure, points: Sequence[_MemoryPoint], *, limit: float) -> None:
    """Draw the line of exact beliefs, and the device's memory (GiB) if it is at most twice the largest value."""
    import plotly.graph_objects as go

    high = max(max(p.peak.believed_bytes, p.measured) for p in points) / _GIB * 1.05
    figure.add_trace(
        go.Scatter(
            x=[0, high],
            y=[0, high],
            mode="lines",
            name=BELIEVED_AS_MEASURED,
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
    peak: BelievedPeak
    measured: int
    """Bytes of the worst rank at the peak."""
    hover: str


def _memory_points(view: StudyView) -> list[_MemoryPoint]:
    points = []
    for trial in view.trials:
        config, measured = trial.user_attrs.get(attributes.CONFIG), trial.user_attrs.get(attributes.PEAK_BYTES, 0)
        if config is None or measured <= 0 or view.memory is None or trial.number not in view.memory.peaks:
            continue
        peak = view.memory.peaks[trial.number]
        words, moment = Structure.of(config).words, _MOMENTS.get(peak.moment, peak.moment)
        by = "corrected by the launches before it" if peak.corrected else "formulas alone: nothing had corrected them"
        lines = [
            f"<b>{words}, micro-batch {config[MICRO_BATCH]}</b>",
            f"trial {trial.number}",
            f"believed {bytes_in_words(peak.believed_bytes)}, {by}",
            f"formulas alone {bytes_in_words(peak.formula_bytes)}, {moment}",
            f"measured {bytes_in_words(measured)} ({measured / peak.believed_bytes - 1:+.0%} of what was believed)",
        ]
        points.append(_MemoryPoint(words=words, peak=peak, measured=int(measured), hover="<br>".join(lines)))
    return points
