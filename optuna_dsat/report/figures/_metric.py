"""The metric over the micro-batch, measured and as the posterior of ``guided`` predicts it, for any method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION
from optuna_dsat.config.structures import Structure
from optuna_dsat.guided.acquisition import Prediction
from optuna_dsat.metrics import Z_975
from optuna_dsat.report.figures._source import History, Source, history_of, measure_of
from optuna_dsat.report.figures._style import (
    INK,
    WARNING,
    Measure,
    Palette,
    empty_figure,
    lay_out,
    lineage_words,
    new_figure,
)
from optuna_dsat.report.view import StudyView
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import (
    MICRO_BATCH,
    STRUCTURE,
    Lineage,
    group,
    lineage_key,
    score,
    visible_params,
    without_batch,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

EDGE = "out of memory"
"""Name of the trace that shows the lineages' memory limits."""
MEMORY_EDGE = "memory edge (predicted)"
_OTHER_BATCH = "at your global batch"
"""Name of the trials that accumulate to the global batch of the user's config, in a search of other batches."""
USER = "your config"
BEST = "best"
CONFIRMED = ", measured in rounds"
"""Suffix of these names if rounds decided."""

_LEAST_TICKS = 3
_MOST_TICKS = 6
_BAND = 0.15
"""Opacity of a curve's band: bands of several structures overlap."""


def plot_metric(study: Source) -> go.Figure:
    """Plot the metric over the micro-batch (samples per GPU and pass), with the models' curves and memory edges.

    A curve is the prediction of the models fitted to the study (the posterior of ``guided``) for the fastest settings
    of a ZeRO structure, with its 95% band, up to the memory edge. Filled points have the settings of the curve, open
    points others. Structures without a curve have a line per lineage: trials that differ in the micro-batch only.
    Throughput is in samples/s over all ranks, FLOPS_per_gpu too if these are known, times in ms. A cross marks the
    smallest micro-batch of a lineage that ran out of memory.

    Args:
        study: Any Optuna study whose trials have a micro-batch, or a ``StudyView``.
    """
    history = history_of(study)
    return metric_figure(history, curves_of(history.view))


def metric_figure(history: History, curves: Sequence[Curve] = ()) -> go.Figure:
    """Return the metric over the micro-batch: curves, points and memory limits.

    Lineages of the same ZeRO stage and offload share a colour and a legend entry. The memory limit of a lineage is the
    smallest micro-batch that did not fit, drawn at the height of the largest that fitted, or on the axis without any.
    The best trial and the user's config are marked at their metric in rounds, if rounds decided.
    """
    trials, measure = history.trials, measure_of(history)
    title = f"{measure.title.split(' (')[0].capitalize()} over micro-batch"
    x_title = "micro-batch (samples per rank and pass, log scale)"
    measured = attributes.best_trials(trials, maximize=history.maximize)
    lineages = [lineage for lineage in group(trials).values() if _points(lineage) or lineage.smallest_too_large]
    if not measured and not any(_points(lineage) for lineage in lineages):
        return empty_figure("Nothing has been measured yet.", title=title, x=x_title, y=measure.title)
    if history.view is not None and len(measured) == 1:
        return empty_figure("One configuration was measured.", title=title, x=x_title, y=measure.title)
    figure = new_figure()
    drawn = {curve.words: curve for curve in curves}
    palette = Palette([*drawn, *(lineage_words(lineage.trials) for lineage in lineages)])
    for curve in curves:
        _add_curve(figure, curve, palette[curve.words], measure)
    named: set[str] = set()
    on_curve = {curve.lineage for curve in curves}
    for lineage in sorted(lineages, key=lambda item: item.key not in on_curve):
        words = lineage_words(lineage.trials)
        if _points(lineage):
            mode = "lines+markers" if len(_points(lineage)) > 1 else "markers"
            if words in drawn:
                mode = "markers" if lineage.key in on_curve else "open"
            _add_points(figure, lineage, words, palette, measure=measure, named=words not in named, mode=mode)
            named.add(words)
    _add_other_batch(figure, trials, palette, measure)
    if any(curve.edge is not None for curve in curves):
        _add_memory_edges(figure, curves, measure.scale)
    edges = [lineage for lineage in lineages if lineage.smallest_too_large is not None]
    if edges:
        _add_edges(figure, edges, measure.scale)
    best = next((t for t in measured if t.number == history.winner), measured[0] if measured else None)
    user = attributes.user_config_trial(trials)
    for trial, name, symbol in ((user, USER, "x-open"), (best, BEST, "star")):
        if trial is not None and attributes.CONFIG in trial.user_attrs:
            again = history.confirmed.get(trial.number)
            _add_mark(figure, trial, name, symbol, measure=measure, again=again)
    lay_out(figure, title=title, x=x_title, y=measure.title)
    micro_batches = [int(x) for trace in figure.data for x in trace.x if x is not None]
    figure.update_xaxes(type="log", tickvals=micro_batch_ticks(micro_batches))
    figure.update_yaxes(tickformat=measure.ticks, rangemode="tozero")
    return figure


def _add_curve(figure: go.Figure, curve: Curve, colour: str, measure: Measure) -> None:
    """Add the band and the curve of a structure."""
    common: dict[str, Any] = {"mode": "lines", "legendgroup": curve.words, "name": curve.words, "showlegend": False}
    figure.add_scatter(
        x=[*curve.sizes, *reversed(curve.sizes)],
        y=[value * measure.scale for value in (*curve.high, *reversed(curve.low))],
        fill="toself",
        fillcolor=colour,
        opacity=_BAND,
        line={"width": 0},
        hoverinfo="skip",
        **common,
    )
    figure.add_scatter(
        x=list(curve.sizes),
        y=[value * measure.scale for value in curve.values],
        line={"color": colour, "width": 2},
        hovertext=[
            f"<b>{curve.words}, micro-batch {size}</b><br>predicted {measure.shown(value)}"
            f"<br>95% credible {measure.shown(low)} to {measure.shown(high)}"
            for size, value, low, high in zip(curve.sizes, curve.values, curve.low, curve.high, strict=True)
        ],
        hoverinfo="text",
        **common,
    )


def _add_memory_edges(figure: go.Figure, curves: Sequence[Curve], scale: float) -> None:
    """Add a vertical line at the largest micro-batch that is expected to fit, for each curve that ends there."""
    ends = [(curve, curve.edge) for curve in curves if curve.edge is not None]
    figure.add_scatter(
        x=[x for _, edge in ends for x in (edge, edge, None)],
        y=[y for curve, _ in ends for y in (0.0, curve.values[-1] * scale, None)],
        mode="lines",
        name=MEMORY_EDGE,
        connectgaps=False,
        line={"color": WARNING, "dash": "dash", "width": 1.5},
        hovertext=[
            text
            for curve, edge in ends
            for text in (*[f"<b>{curve.words}</b><br>micro-batch {edge} is the largest expected to fit"] * 2, "")
        ],
        hoverinfo="text",
    )


def _points(lineage: Lineage) -> list[tuple[int, float, FrozenTrial]]:
    """Return (micro-batch, metric, trial) of all trials with a metric, by micro-batch."""
    result = [(lineage.size(t), value, t) for t in lineage.trials if (value := score(t)) is not None]
    return sorted(result, key=lambda point: (point[0], point[2].number))


def _add_points(
    figure: go.Figure, lineage: Lineage, words: str, palette: Palette, *, measure: Measure, named: bool, mode: str
) -> None:
    """Add the points of a lineage, in a ``mode`` of plotly, or ``open`` for open markers."""
    points = _points(lineage)
    is_open = mode == "open"
    figure.add_scatter(
        x=[size for size, _, _ in points],
        y=[value * measure.scale for _, value, _ in points],
        mode="markers" if is_open else mode,
        name=words,
        legendgroup=words,
        showlegend=named,
        line={"color": palette[words], "width": 1.5},
        marker={"symbol": palette.symbol(words) + "-open" * is_open, "size": 8, "color": palette[words]},
        hovertext=[_hover(trial, words, measure, value) for _, value, trial in points],
        hoverinfo="text",
    )


def _add_other_batch(figure: go.Figure, trials: Sequence[FrozenTrial], palette: Palette, measure: Measure) -> None:
    """Add the trials with accumulation steps of their own, which are not part of a lineage."""
    accumulated = [t for t in trials if GRADIENT_ACCUMULATION in t.params and score(t) is not None]
    words = [lineage_words([trial]) for trial in accumulated]
    if accumulated:
        figure.add_scatter(
            x=[trial.params[MICRO_BATCH] for trial in accumulated],
            y=[(score(trial) or 0.0) * measure.scale for trial in accumulated],
            mode="markers",
            name=_OTHER_BATCH,
            marker={
                "symbol": "diamond-tall-open",
                "size": 11,
                "color": [palette[name] for name in words],
                "line": {"width": 2},
            },
            hovertext=[
                _hover(trial, name, measure, score(trial) or 0.0)
                for trial, name in zip(accumulated, words, strict=True)
            ],
            hoverinfo="text",
        )


def _hover(trial: FrozenTrial, words: str, measure: Measure, value: float) -> str:
    config = trial.user_attrs.get(attributes.CONFIG, trial.params)
    lines = [
        f"<b>{words}, micro-batch {config.get(MICRO_BATCH, '?')}</b>",
        f"trial {trial.number}: {measure.shown(value)} in the search",
    ]
    if trial.state is not TrialState.COMPLETE:
        lines[1] += " (stopped early)"
    return "<br>".join(lines + _knobs(trial.params))


def _knobs(params: Mapping[str, Any]) -> list[str]:
    """Return the knobs other than structure and micro-batch, a line each."""
    return [
        f"{name} = {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{name} = {value}"
        for name, value in params.items()
        if name not in (*STRUCTURE, MICRO_BATCH)
    ]


def _add_edges(figure: go.Figure, lineages: Sequence[Lineage], scale: float) -> None:
    """Add all memory limits, each joined by a dotted line to the largest micro-batch that fitted."""
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
        head = f"<b>{lineage_words(lineage.trials)}</b><br>out of memory at micro-batch {edge}, {fits}"
        texts += ["<br>".join([head, *_knobs(lineage.params)]), ""]
        sizes += [11, 0]
    figure.add_scatter(
        x=x,
        y=y,
        mode="lines+markers",
        name=EDGE,
        connectgaps=False,
        line={"color": WARNING, "dash": "dot", "width": 1},
        marker={"symbol": "x-thin", "size": sizes, "color": WARNING, "line": {"color": WARNING, "width": 2}},
        hovertext=texts,
        hoverinfo="text",
    )


def _add_mark(
    figure: go.Figure, trial: FrozenTrial, name: str, symbol: str, *, measure: Measure, again: float | None
) -> None:
    """Add the mark of a trial at its metric in rounds or, without rounds, in the search."""
    config, value = trial.user_attrs[attributes.CONFIG], trial.values[0] if again is None else again
    text = f"{name}<br>" + _hover(trial, Structure.of(config).words, measure, trial.values[0])
    if again is not None:
        name, text = f"{name}{CONFIRMED}", f"{text}<br>in rounds: {measure.shown(again)}"
    figure.add_scatter(
        x=[int(config[MICRO_BATCH])],
        y=[value * measure.scale],
        mode="markers",
        name=name,
        marker={"symbol": symbol, "size": 15, "color": INK, "line": {"color": INK, "width": 2}},
        hovertext=[text],
        hoverinfo="text",
    )


def micro_batch_ticks(values: Sequence[int]) -> list[int]:
    """Return the ticks of a logarithmic axis of micro-batches: powers of two, or micro-batches if few are in range."""
    if not values:
        return [1]
    low, high = math.floor(math.log2(max(1, min(values)))), math.ceil(math.log2(max(1, *values)))
    powers = [2**power for power in range(low, high + 1)]
    if sum(min(values) <= power <= max(values) for power in powers) >= _LEAST_TICKS:
        return powers
    distinct = sorted(set(values))
    return distinct[:: math.ceil(len(distinct) / _MOST_TICKS)]


_MOST_CURVES = 4
"""Structures with a curve: the fastest, and the structure of the user's config in any case."""
_MOST_SIZES, _MOST_POINTS = 400, 60
"""Micro-batches at which a structure is predicted, and which of these a curve connects."""
_BEYOND = 1.5
"""Largest predicted micro-batch, relative to the largest launched."""
_FITS = 0.5
"""Least probability to fit within the memory edge."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The predicted metric of a lineage, the fastest of its structure, up to the memory edge."""

    words: str
    """The structure."""
    lineage: str
    """Key of the lineage, as ``trials.lineage.group`` has it."""
    sizes: tuple[int, ...]
    """Micro-batches, ascending."""
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    """Ends of the 95% credible band."""
    edge: int | None
    """Largest micro-batch expected to fit; None if it is beyond the predicted micro-batches."""


def curves_of(view: StudyView | None) -> tuple[Curve, ...]:
    """Return the curves of a study's fastest structures; empty without a measurement or a profile."""
    if view is None or view.best is None or view.planner is None:
        return ()
    planner, chosen = view.planner, _chosen(view)
    largest = max(trial.user_attrs[attributes.CONFIG].get(MICRO_BATCH, 1) for trial in view.launched)
    sizes = planner.problem.sizes[planner.problem.sizes <= _BEYOND * largest]
    if len(sizes) > _MOST_SIZES:
        sizes = planner.problem.sizes[
            np.unique(planner.problem.size_index(np.geomspace(sizes[0], sizes[-1], _MOST_SIZES)))
        ]
    asked = [(without_batch(visible_params(trial)), int(size)) for trial in chosen for size in sizes]
    predicted = iter(planner.predict(view.trials, asked))
    curves = (_curve(trial, [(int(size), next(predicted)) for size in sizes]) for trial in chosen)
    return tuple(curve for curve in curves if curve is not None)


def _chosen(view: StudyView) -> Sequence[FrozenTrial]:
    """Return the best trial of each structure with a curve, the result and the user's structure among them."""
    user = attributes.user_config_trial(view.trials)
    ranked = [*([] if view.best is None else [view.best.trial]), *view.measured]
    inside = [trial for trial in ranked if MICRO_BATCH in trial.params]
    best: dict[str, FrozenTrial] = {}
    for trial in inside:
        best.setdefault(lineage_words([trial]), trial)
    users = None if user is None else lineage_words([user])
    first = [words for words in best if words != users][: _MOST_CURVES - (users in best)]
    return [trial for words, trial in best.items() if words in first or words == users]


def _curve(trial: FrozenTrial, predicted: Sequence[tuple[int, Prediction | None]]) -> Curve | None:
    """Return the curve of a trial's lineage by (micro-batch, prediction); None if at most one micro-batch fits."""
    known = [(size, item) for size, item in predicted if item is not None and item.fits >= _FITS]
    if len(known) < 2:
        return None
    shown = [*known[: -1 : math.ceil(len(known) / _MOST_POINTS)], known[-1]]
    low, value, high = (
        tuple(item.value * math.exp(sigmas * item.spread) for _, item in shown) for sigmas in (-Z_975, 0, Z_975)
    )
    return Curve(
        words=lineage_words([trial]),
        lineage=lineage_key(without_batch(visible_params(trial))),
        sizes=tuple(size for size, _ in shown),
        values=value,
        low=low,
        high=high,
        edge=known[-1][0] if known[-1][0] < predicted[-1][0] else None,
    )
