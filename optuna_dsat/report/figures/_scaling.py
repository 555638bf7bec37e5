"""Samples/s per device over the number of devices, for choosing this number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optuna_dsat.metrics import shares_of_linear
from optuna_dsat.report.figures._style import INK, empty_figure, lay_out
from optuna_dsat.words import count_in_words, metric_in_words, slot_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["AtCount", "scaling_figure"]

_RATE = "throughput"


@dataclass(frozen=True, kw_only=True)
class AtCount:
    """Result of the search at a number of devices."""

    devices: int
    samples_per_s: float | None
    """Samples/s of the result over all devices; None if nothing was measured."""

    @property
    def each(self) -> float | None:
        """Samples/s per device; None if nothing was measured."""
        return None if self.samples_per_s is None else self.samples_per_s / self.devices


def scaling_figure(rows: Sequence[AtCount], *, device: str) -> go.Figure:
    """Return the samples/s per device by number of devices, with the ratio to the smallest number's samples/s."""
    import plotly.graph_objects as go

    unit = slot_name(device)
    title, x, y = "Scaling", f"{unit}s", f"samples/s per {unit}"
    measured = [row for row in rows if row.each]
    if len(measured) < 2:
        return empty_figure("Fewer than two numbers of devices were measured.", title=title, x=x, y=y)
    shares = shares_of_linear([row.each for row in measured])
    places, least = list(range(len(measured))), measured[0].each
    parts = [
        f"{row.devices} {unit}{'s' * (row.devices > 1)}: {metric_in_words(_RATE, row.each or 0.0)} each, "
        f"{metric_in_words(_RATE, row.samples_per_s or 0.0)} in all, {share or 0.0:.0%} of linear"
        for row, share in zip(measured, shares, strict=True)
    ]
    figure = go.Figure(
        [
            go.Bar(
                x=places,
                y=[row.each for row in measured],
                name=f"samples/s per {unit}, and the scaling efficiency",
                marker={"color": "#0072B2"},
                text=[
                    f"{count_in_words(row.each or 0.0)}<br>{share or 0.0:.0%}"
                    for row, share in zip(measured, shares, strict=True)
                ],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                hovertext=parts,
                hoverinfo="text",
            ),
            go.Scatter(
                x=[-0.5, len(measured) - 0.5],
                y=[least, least],
                mode="lines",
                name="linear scaling",
                line={"color": INK, "dash": "dash", "width": 1.5},
                hoverinfo="skip",
            ),
        ]
    )
    lay_out(figure, title=title, x=x, y=y, showlegend=True, bargap=0.5)
    figure.update_xaxes(
        tickvals=places, ticktext=[str(row.devices) for row in measured], range=[-0.5, len(measured) - 0.5]
    )
    figure.update_yaxes(rangemode="tozero")
    return figure
