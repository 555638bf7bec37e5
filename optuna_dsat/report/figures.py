"""Plots of a study's history: pure functions from trials to plotly figures.

Values are handed to plotly as plain lists, so the figures travel as readable JSON to any version of plotly.js.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState

from optuna_dsat import history, memory
from optuna_dsat.lineage import MICRO_BATCH, STRUCTURE, Lineage, group, score
from optuna_dsat.profiling import Profiled
from optuna_dsat.spec import LARGER_IS_BETTER, StudySpec
from optuna_dsat.study_space import hardware_of
from optuna_dsat.words import bytes_in_words, metric_in_words, zero_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["BEST", "EDGE", "PREDICTED_AS_MEASURED", "USER", "memory_figure", "metric_figure"]

EDGE = "out of memory"
"""Name of the trace that shows where lineages run out of memory."""
USER = "your own config"
BEST = "best"
PREDICTED_AS_MEASURED = "predicted = measured"

_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#8C564B", "#4B6A53", "#A0A000",
)  # fmt: skip
"""The first six are those of Okabe and Ito (2008), told apart by colour-blind readers."""
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "hexagon")
_AXIS_TITLES = {
    "throughput": "throughput (samples/s)",
    "FLOPS_per_gpu": "speed (FLOP/s per GPU)",
    "latency": "time of a step, end to end (ms)",
    "forward": "forward pass (ms)",
    "backward": "backward pass (ms)",
    "step": "optimizer step (ms)",
}
_MOMENTS = {
    "forward": "peak at the end of the forward pass",
    "backward": "peak at the end of the backward pass",
    "convert": "peak when the gradients are converted",
    "step": "peak in the optimizer step",
}
_GIB = 2**30


def metric_figure(trials: Sequence[FrozenTrial], *, metric: str, winner: int | None = None) -> go.Figure:
    """Return the metric over the micro-batch: one line per lineage, with its out-of-memory edge.

    Lineages of the same ZeRO stage and offload share a colour and one entry of the legend. The edge of a lineage is
    the smallest micro-batch that did not fit, drawn at the height of the largest that did, or on the axis where none
    did.

    Args:
        trials: Any history; trials without a micro-batch parameter are shown only if they are the best or the user's.
        metric: Name of the metric; times are given in seconds and shown in ms.
        winner: Number of the trial to mark as the best; None for the one with the best value.
    """
    import plotly.graph_objects as go

    scale = 1.0 if metric in LARGER_IS_BETTER else 1000.0
    figure = go.Figure()
    lineages = [lineage for lineage in group(trials).values() if _points(lineage) or lineage.smallest_too_large]
    palette = _Palette(_words(lineage.trials) for lineage in lineages)
    named: set[str] = set()
    for lineage in lineages:
        words = _words(lineage.trials)
        if _points(lineage):
            figure.add_trace(_line(lineage, words, palette, metric=metric, scale=scale, named=words not in named))
            named.add(words)
    edges = [lineage for lineage in lineages if lineage.smallest_too_large is not None]
    if edges:
        figure.add_trace(_edges(edges, scale))
    maximize = metric in LARGER_IS_BETTER
    measured = history.best_trials(trials, maximize=maximize)
    best = next((t for t in measured if t.number == winner), measured[0] if measured else None)
    user = history.user_config_trial(trials)
    for trial, name, symbol in ((user, USER, "x-open"), (best, BEST, "star")):
        if trial is not None and history.CONFIG in trial.user_attrs:
            figure.add_trace(_mark(trial, name, symbol, metric=metric, scale=scale))
    micro_batches = [int(x) for trace in figure.data for x in trace.x if x is not None]
    _lay_out(
        figure,
        title=f"{_AXIS_TITLES.get(metric, metric).split(' (')[0].capitalize()} over micro-batch",
        x="micro-batch (samples per GPU and pass, log scale)",
        y=_AXIS_TITLES.get(metric, metric),
        empty=not figure.data,
    )
    figure.update_xaxes(type="log", tickvals=_powers_of_two(micro_batches))
    figure.update_yaxes(tickformat="~s" if metric == "FLOPS_per_gpu" else None)
    return figure


def memory_figure(trials: Sequence[FrozenTrial], *, spec: StudySpec, profiled: Profiled) -> go.Figure:
    """Return the measured peak memory per rank over the predicted one, before any correction by measurements.

    Args:
        trials: Trials with a config; those without a measured peak are left out.
        spec: The study.
        profiled: What the profile launch taught.
    """
    import plotly.graph_objects as go

    points = _memory_points(trials, spec, profiled)
    figure = go.Figure()
    palette = _Palette(point.words for point in points)
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
    title = "Peak memory per rank, predicted (uncorrected) and measured"
    if points:
        limit = profiled.profile.device_memory_bytes / _GIB
        high = max(max(p.predicted, p.measured) for p in points) / _GIB * 1.05
        figure.add_trace(
            go.Scatter(
                x=[0, high],
                y=[0, high],
                mode="lines",
                name=PREDICTED_AS_MEASURED,
                line={"color": "#888888", "dash": "dash", "width": 1},
                hoverinfo="skip",
            )
        )
        if limit <= 2 * high:
            figure.add_hline(
                y=limit,
                line={"color": "#B00020", "width": 1},
                annotation_text="device memory",
                annotation_position="top left",
            )
        error = statistics.median(abs(p.measured - p.predicted) / p.measured for p in points)
        title += f"<br><sub>half of the {len(points)} predictions are within {error:.0%} of what was measured</sub>"
    _lay_out(figure, title=title, x="predicted (GiB)", y="measured (GiB)", empty=not points)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


@dataclass(frozen=True, kw_only=True)
class _MemoryPoint:
    words: str
    predicted: int
    measured: int
    hover: str


def _memory_points(trials: Sequence[FrozenTrial], spec: StudySpec, profiled: Profiled) -> list[_MemoryPoint]:
    hardware = hardware_of(spec, profiled)
    points = []
    for trial in trials:
        config, measured = trial.user_attrs.get(history.CONFIG), trial.user_attrs.get(history.PEAK_BYTES, 0)
        if config is None or measured <= 0:
            continue
        micro_batch = int(config[MICRO_BATCH])
        estimate = memory.estimate(profiled.profile, config, micro_batch=micro_batch, hardware=hardware)
        predicted = estimate.device_bytes
        words = zero_in_words(config)
        lines = [
            f"<b>{words}, micro-batch {micro_batch}</b>",
            f"trial {trial.number}",
            f"predicted {bytes_in_words(predicted)}, {_MOMENTS.get(estimate.moment, estimate.moment)}",
            f"measured {bytes_in_words(measured)} ({(measured - predicted) / predicted:+.0%})",
        ]
        points.append(_MemoryPoint(words=words, predicted=predicted, measured=int(measured), hover="<br>".join(lines)))
    return points


class _Palette:
    """A colour and a symbol for each set of words, in the order they first come."""

    def __init__(self, words: Iterable[str]) -> None:
        self._index = {word: index for index, word in enumerate(dict.fromkeys(words))}

    def __getitem__(self, words: str) -> str:
        return _COLOURS[self._index[words] % len(_COLOURS)]

    def symbol(self, words: str) -> str:
        return _SYMBOLS[self._index[words] % len(_SYMBOLS)]


def _words(trials: Sequence[FrozenTrial]) -> str:
    """Return stage and offload of a lineage in words."""
    for trial in trials:
        if history.CONFIG in trial.user_attrs:
            return zero_in_words(trial.user_attrs[history.CONFIG])
    params = trials[0].params
    offload = {key: {"device": params[key]} for key in STRUCTURE[1:] if key in params}
    return zero_in_words({"zero_optimization": {"stage": params.get(STRUCTURE[0], 0), **offload}})


def _points(lineage: Lineage) -> list[tuple[int, float, FrozenTrial]]:
    """Return (micro-batch, metric, trial) of all trials that showed a metric, by micro-batch."""
    shown = [(lineage.size(t), value, t) for t in lineage.trials if (value := score(t)) is not None]
    return sorted(shown, key=lambda point: (point[0], point[2].number))


def _line(lineage: Lineage, words: str, palette: _Palette, *, metric: str, scale: float, named: bool) -> go.Scatter:
    import plotly.graph_objects as go

    shown = _points(lineage)
    return go.Scatter(
        x=[size for size, _, _ in shown],
        y=[value * scale for _, value, _ in shown],
        mode="lines+markers",
        name=words,
        legendgroup=words,
        showlegend=named,
        line={"color": palette[words], "width": 1.5},
        marker={"symbol": palette.symbol(words), "size": 8},
        hovertext=[_hover(trial, words, metric, value) for _, value, trial in shown],
        hoverinfo="text",
    )


def _hover(trial: FrozenTrial, words: str, metric: str, value: float) -> str:
    config = trial.user_attrs.get(history.CONFIG, trial.params)
    lines = [
        f"<b>{words}, micro-batch {config.get(MICRO_BATCH, '?')}</b>",
        f"trial {trial.number}: {metric_in_words(metric, value)}",
    ]
    if trial.state is not TrialState.COMPLETE:
        lines[1] += " (stopped early)"
    return "<br>".join(lines + _knobs(trial.params))


def _knobs(params: Mapping[str, Any]) -> list[str]:
    """Return the knobs that the words of a configuration leave out, one a line."""
    return [
        f"{name} = {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{name} = {value}"
        for name, value in params.items()
        if name not in (*STRUCTURE, MICRO_BATCH)
    ]


def _edges(lineages: Sequence[Lineage], scale: float) -> go.Scatter:
    """Return one trace with every lineage's edge, joined by a dotted line to its largest micro-batch that fitted."""
    import plotly.graph_objects as go

    x: list[int | None] = []
    y: list[float | None] = []
    texts: list[str] = []
    sizes: list[int] = []
    for lineage in lineages:
        edge = lineage.smallest_too_large
        below = [(size, value) for size, value, _ in _points(lineage) if edge is not None and size < edge]
        last = below[-1] if below else None
        if last is not None:
            x.append(last[0])
            y.append(last[1] * scale)
            texts.append("")
            sizes.append(0)
        x += [edge, None]
        y += [0.0 if last is None else last[1] * scale, None]
        fits = "nothing smaller ran" if lineage.largest_fit is None else f"{lineage.largest_fit} fits"
        head = f"<b>{_words(lineage.trials)}</b><br>out of memory at micro-batch {edge}, {fits}"
        texts += ["<br>".join([head, *_knobs(lineage.params)]), ""]
        sizes += [11, 0]
    return go.Scatter(
        x=x,
        y=y,
        mode="lines+markers",
        name=EDGE,
        connectgaps=False,
        line={"color": "#B00020", "dash": "dot", "width": 1},
        marker={"symbol": "x-thin", "size": sizes, "color": "#B00020", "line": {"color": "#B00020", "width": 2}},
        hovertext=texts,
        hoverinfo="text",
    )


def _mark(trial: FrozenTrial, name: str, symbol: str, *, metric: str, scale: float) -> go.Scatter:
    import plotly.graph_objects as go

    config = trial.user_attrs[history.CONFIG]
    return go.Scatter(
        x=[int(config[MICRO_BATCH])],
        y=[trial.values[0] * scale],
        mode="markers",
        name=name,
        marker={"symbol": symbol, "size": 15, "color": "#000000", "line": {"color": "#000000", "width": 2}},
        hovertext=[f"{name}<br>" + _hover(trial, zero_in_words(config), metric, trial.values[0])],
        hoverinfo="text",
    )


def _powers_of_two(values: Sequence[int]) -> list[int]:
    if not values:
        return [1]
    low, high = math.floor(math.log2(max(1, min(values)))), math.ceil(math.log2(max(1, *values)))
    return [2**power for power in range(low, high + 1)]


def _lay_out(figure: go.Figure, *, title: str, x: str, y: str, empty: bool) -> None:
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="none",
        legend={"font": {"size": 11}},
        hovermode="closest",
        margin={"l": 80, "r": 20, "t": 60, "b": 60},
    )
    figure.update_xaxes(title={"text": x})
    figure.update_yaxes(title={"text": y})
    if empty:
        figure.add_annotation(
            text="Nothing has been measured yet.", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False
        )
