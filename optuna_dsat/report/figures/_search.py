"""The course of a search: its progress, outcomes, tried micro-batches, and the rungs of ``asha``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from optuna_dsat.outcome import Outcome
from optuna_dsat.pruners._rungs import Rung, Rungs, build_rungs
from optuna_dsat.report.figures._metric import BEST, CONFIRMED, USER, micro_batch_ticks
from optuna_dsat.report.figures._style import (
    INK,
    NEUTRAL,
    OUTCOME_COLOURS,
    WARNING,
    Measure,
    Palette,
    empty_figure,
    lay_out,
    lineage_words,
    new_figure,
    wrapped,
)
from optuna_dsat.study.spec import MethodOptions
from optuna_dsat.trials import attributes, bisection
from optuna_dsat.trials.lineage import Feasibility, Lineage, feasibility, group, score
from optuna_dsat.words import config_in_words, things_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["BEST_SO_FAR", "micro_batches_figure", "outcomes_figure", "progress_figure", "rungs_figure"]

BEST_SO_FAR = "best so far in the search"
_NO_LAUNCH = "No launch has ended yet."
_MAX_ROWS = 16
_FEW_LAUNCHES = 10
"""Most launches on an axis for which every whole number has a tick: there is no half of one."""
"""Most lineages whose micro-batches are shown: those with the most launches."""


def _ended(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the finished launches in the order in which they ended; lost ones are left out."""
    over = [
        t
        for t in trials
        if t.state.is_finished()
        and attributes.VETOED not in t.user_attrs
        and t.user_attrs.get(attributes.OUTCOME) != Outcome.LOST
    ]
    return sorted(over, key=lambda t: (t.datetime_complete is None, t.datetime_complete, t.number))


def _outcome(trial: FrozenTrial) -> Outcome:
    """Return a trial's outcome; derived from its state if its study records no outcomes."""
    known = trial.user_attrs.get(attributes.OUTCOME)
    if known is not None:
        return Outcome(known)
    says = feasibility(trial)
    if says is Feasibility.TOO_LARGE:
        return Outcome.OUT_OF_MEMORY
    if says is Feasibility.FITS:
        return Outcome.MEASURED if trial.state.name == "COMPLETE" else Outcome.PRUNED
    return Outcome.SCRIPT_ERROR


def _words(trial: FrozenTrial) -> str:
    config = trial.user_attrs.get(attributes.CONFIG)
    return f"trial {trial.number}" if config is None else f"trial {trial.number}: {config_in_words(config)}"


def progress_figure(
    trials: Sequence[FrozenTrial],
    *,
    metric: str,
    maximize: bool,
    confirmed: tuple[int, float] | None = None,
    device: str = "",
) -> go.Figure:
    """Return the metric of every launch in the order in which they ended, the best so far, and the user's config.

    All of these are values of the search. Launches without a metric are drawn on the axis, in the colour of their
    outcome.

    Args:
        trials: The study's trials.
        metric: Name of the metric.
        maximize: Whether a larger one is better.
        confirmed: Trial and metric that rounds confirmed; None if no rounds decided.
        device: What a rank runs on, ``cuda`` or ``cpu``; empty if it is not known.
    """
    import plotly.graph_objects as go

    title, x_title, measure = "Progress of the search", "launches that ended", Measure(metric, device)
    ended, scale = _ended(trials), measure.scale
    if not ended:
        return empty_figure(_NO_LAUNCH, title=title, x=x_title, y=measure.title)
    if not any(_outcome(trial) is Outcome.MEASURED for trial in ended):
        return empty_figure("Nothing has been measured yet.", title=title, x=x_title, y=measure.title)
    places = {trial.number: place for place, trial in enumerate(ended, start=1)}
    found = {outcome: [t for t in ended if _outcome(t) is outcome] for outcome in Outcome}
    figure = go.Figure([_outcome_trace(outcome, own, places, measure) for outcome, own in found.items() if own])
    best = _best_so_far(ended, maximize=maximize)
    if best:
        figure.add_trace(
            go.Scatter(
                x=[place for place, _ in best],
                y=[value * scale for _, value in best],
                mode="lines",
                name=BEST_SO_FAR,
                line={"color": INK, "width": 1.5, "shape": "hv"},
                hoverinfo="skip",
            )
        )
    user = attributes.user_config_trial(trials)
    if user is not None:
        line = {"color": NEUTRAL, "dash": "dash", "width": 1.5}
        values = [user.values[0] * scale] * 2
        name = f"{USER} in the search"
        figure.add_trace(go.Scatter(x=[1, len(ended)], y=values, mode="lines", name=name, line=line, hoverinfo="name"))
    if confirmed is not None:
        figure.add_trace(_confirmed_trace(*confirmed, place=len(ended) + 1, measure=measure))
    lay_out(figure, title=title, x=x_title, y=measure.title)
    figure.update_yaxes(rangemode="tozero", tickformat=measure.ticks)
    if len(ended) <= _FEW_LAUNCHES:
        figure.update_xaxes(dtick=1)
    return figure


def _outcome_trace(
    outcome: Outcome, own: Sequence[FrozenTrial], places: Mapping[int, int], measure: Measure
) -> go.Scatter:
    """Return the trace of the launches with one outcome; those without a metric are drawn on the axis."""
    import plotly.graph_objects as go

    values = [score(t) for t in own]
    return go.Scatter(
        x=[places[t.number] for t in own],
        y=[0.0 if value is None else value * measure.scale for value in values],
        mode="markers",
        name=outcome.value.replace("_", " "),
        cliponaxis=False,
        marker={
            "color": OUTCOME_COLOURS[outcome],
            "symbol": "circle" if outcome is Outcome.MEASURED else "x-thin-open",
            "size": 8,
            "line": {"color": OUTCOME_COLOURS[outcome], "width": 1.5},
        },
        hovertext=[
            _words(t) + ("" if value is None else f"<br>{measure.shown(value)}")
            for t, value in zip(own, values, strict=True)
        ],
        hoverinfo="text",
    )


def _confirmed_trace(number: int, value: float, *, place: int, measure: Measure) -> go.Scatter:
    """Return the mark of what rounds confirmed, after the last launch of the search."""
    import plotly.graph_objects as go

    return go.Scatter(
        x=[place],
        y=[value * measure.scale],
        mode="markers",
        name=f"{BEST}{CONFIRMED}",
        marker={"symbol": "star", "size": 13, "color": INK},
        hovertext=[f"trial {number}, in rounds: {measure.shown(value)}"],
        hoverinfo="text",
    )


def _best_so_far(ended: Sequence[FrozenTrial], *, maximize: bool) -> list[tuple[int, float]]:
    """Return (place, best metric so far) from the first measured launch to the last launch."""
    found: list[tuple[int, float]] = []
    for place, trial in enumerate(ended, start=1):
        value = score(trial) if trial.state.name == "COMPLETE" else None
        before = found[-1][1] if found else None
        if value is not None and (before is None or (value > before) == maximize):
            before = value
        if before is not None:
            found.append((place, before))
    return found


def outcomes_figure(trials: Sequence[FrozenTrial]) -> go.Figure:
    """Return how many launches had which outcome, by ZeRO stage and offload."""
    import plotly.graph_objects as go

    title = "Outcomes of the launches"
    ended = _ended(trials)
    if not ended:
        return empty_figure(_NO_LAUNCH, title=title, x="launches")
    counts = Counter((lineage_words([t]), _outcome(t)) for t in ended)
    words = sorted({word for word, _ in counts})
    outcomes = [outcome for outcome in Outcome if any(found is outcome for _, found in counts)]
    figure = go.Figure(
        [
            go.Bar(
                x=[counts[word, outcome] for word in words],
                y=[wrapped(word) for word in words],
                orientation="h",
                name=outcome.value.replace("_", " "),
                marker={"color": OUTCOME_COLOURS[outcome]},
                hovertemplate="%{x} " + outcome.value.replace("_", " ") + "<extra>%{y}</extra>",
            )
            for outcome in outcomes
        ]
    )
    lay_out(figure, title=title, x="launches", y="", barmode="stack", showlegend=True, height=170 + 42 * len(words))
    if max(sum(counts[word, outcome] for outcome in outcomes) for word in words) <= _FEW_LAUNCHES:
        figure.update_xaxes(dtick=1)
    figure.update_yaxes(autorange="reversed")
    return figure


_MARKS: Mapping[Feasibility, tuple[str, str, str]] = {
    Feasibility.FITS: ("ran", "circle", "#009E73"),
    Feasibility.TOO_LARGE: ("too large", "x", WARNING),
    Feasibility.BROKEN: ("failed, whatever the micro-batch", "diamond-open", "#CC79A7"),
    Feasibility.UNKNOWN: ("taught nothing", "circle-open", NEUTRAL),
}
"""Feasibility of a launch -> name, symbol and colour of its mark."""


def micro_batches_figure(trials: Sequence[FrozenTrial]) -> go.Figure:
    """Return the micro-batches that were tried in each lineage, in order: how a bisection approaches the edge.

    One row for each lineage, at most 16 with the most launches; lineages with one launch only if there are no others.
    A line joins the largest micro-batch that ran with the smallest that did not fit: the edge is between the two.
    """
    title, x_title = "Micro-batches tried", "micro-batch (samples per rank and pass, log scale)"
    launched = [one for one in group(trials).values() if one.launches]
    if not launched:
        return empty_figure(_NO_LAUNCH, title=title, x=x_title)
    lineages = [one for one in launched if len(one.launches) > 1] or launched
    most = sorted(lineages, key=lambda one: (-len(one.launches), one.first_number))[:_MAX_ROWS]
    rows = sorted(most, key=lambda one: one.first_number)
    figure = new_figure()
    _add_intervals(figure, rows)
    for says, (name, symbol, colour) in _MARKS.items():
        _add_tries(figure, rows, says, name=name, symbol=symbol, colour=colour)
    which = "those with most launches" if len(rows) < len(lineages) else "those with more than one launch"
    note = (
        "" if len(rows) == len(launched) else f"shown: {len(rows)} of {things_in_words(len(launched), 'row')}, {which}"
    )
    lay_out(figure, title=title, note=note, x=x_title, y="", height=170 + 50 * len(rows))
    sizes = [one.size(t) for one in rows for t in one.launches]
    figure.update_xaxes(type="log", tickvals=micro_batch_ticks(sizes))
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[f"{wrapped(lineage_words(one.trials), 26)}<br>(from trial {one.first_number})" for one in rows],
        range=[len(rows) - 0.4, -0.6],
    )
    return figure


def _add_intervals(figure: go.Figure, rows: Sequence[Lineage]) -> None:
    import plotly.graph_objects as go

    x: list[int | None] = []
    y: list[int | None] = []
    for row, one in enumerate(rows):
        if one.largest_fit is not None and one.smallest_too_large is not None:
            x += [one.largest_fit, one.smallest_too_large, None]
            y += [row, row, None]
    if x:
        line = {"color": WARNING, "width": 3}
        figure.add_trace(go.Scatter(x=x, y=y, mode="lines", name="the edge lies here", line=line, hoverinfo="skip"))


def _add_tries(
    figure: go.Figure, rows: Sequence[Lineage], says: Feasibility, *, name: str, symbol: str, colour: str
) -> None:
    import plotly.graph_objects as go

    tries = [
        (row, place, one, trial)
        for row, one in enumerate(rows)
        for place, trial in enumerate(one.launches, start=1)
        if feasibility(trial) is says
    ]
    if not tries:
        return
    figure.add_trace(
        go.Scatter(
            x=[one.size(trial) for _, _, one, trial in tries],
            y=[row for row, *_ in tries],
            mode="markers+text",
            name=name,
            text=[str(place) for _, place, *_ in tries],
            textposition="top center",
            textfont={"size": 9},
            marker={"color": colour, "symbol": symbol, "size": 9},
            hovertext=[
                f"<b>{lineage_words(one.trials)}</b><br>launch {place}: micro-batch {one.size(trial)}, {name}"
                f"<br>trial {trial.number}"
                for _, place, one, trial in tries
            ],
            hoverinfo="text",
        )
    )


def rungs_figure(
    trials: Sequence[FrozenTrial],
    *,
    method: str,
    options: MethodOptions,
    metric: str,
    direction: StudyDirection,
    device: str = "",
) -> go.Figure:
    """Return which lineages completed which rung of ``asha``, with which metric, and which were promoted.

    Args:
        trials: The study's trials.
        method: The study's search method.
        options: The method's options.
        metric: Name of the metric.
        direction: The direction of the metric.
        device: What a rank runs on, ``cuda`` or ``cpu``; empty if it is not known.
    """
    measure = Measure(metric, device)
    title, x_title = "Rungs of successive halving", "rung (launches given to all that differ in the micro-batch only)"
    y_title = f"best {measure.title}"
    if method != "asha":
        why = f"Only asha climbs rungs; this study searches by {method}."
        return empty_figure(why, title=title, x=x_title, y=y_title)
    lineages = group(trials)
    sizes = Rungs(
        max_rungs=options.max_rungs,
        min_launches=options.min_binary_search_trials,
        divisor=options.divisor,
        early_stopping=options.asha_early_stopping,
    )
    scores = [found for one in lineages.values() if (found := one.best_score(direction)) is not None]
    best = None if not scores else (max if direction == StudyDirection.MAXIMIZE else min)(scores)
    over = frozenset(key for key, one in lineages.items() if bisection.ended(one, direction, best))
    rungs = build_rungs(lineages, rungs=sizes, direction=direction, ended=over)
    if not any(rung.completed for rung in rungs):
        why = f"Nothing has completed the lowest rung yet, of {things_in_words(sizes.size(0), 'launch')}."
        return empty_figure(why, title=title, x=x_title, y=y_title)
    return _draw_rungs(rungs, sizes, lineages, measure, direction, title=title, x=x_title, y=y_title)


def _draw_rungs(
    rungs: Sequence[Rung],
    sizes: Rungs,
    lineages: Mapping[str, Lineage],
    measure: Measure,
    direction: StudyDirection,
    *,
    title: str,
    x: str,
    y: str,
) -> go.Figure:
    rungs = [rung for rung in rungs if rung.completed]
    palette = Palette(lineage_words(lineages[key].trials) for key in rungs[0].completed)
    figure, named = new_figure(), set[str]()
    for key in rungs[0].completed:
        one = lineages[key]
        words = lineage_words(one.trials)
        points = [
            (index, value, key in rung.promoted)
            for index, rung in enumerate(rungs)
            if key in rung.completed and (value := one.best_score(direction, first=sizes.size(index))) is not None
        ]
        if points:
            figure.add_trace(_rung_trace(one, words, points, palette, sizes, measure, named=words not in named))
            named.add(words)
    lay_out(figure, title=title, note="filled: goes on to the next rung; open: waits, or the top", x=x, y=y)
    figure.update_xaxes(
        tickvals=list(range(len(rungs))),
        ticktext=[
            f"{index}: {things_in_words(sizes.size(index), 'launch')}<br>{len(rung.completed)} completed"
            for index, rung in enumerate(rungs)
        ],
        range=[-0.4, len(rungs) - 0.6],
    )
    figure.update_yaxes(tickformat=measure.ticks)
    return figure


def _rung_trace(
    one: Lineage,
    words: str,
    points: Sequence[tuple[int, float, bool]],
    palette: Palette,
    sizes: Rungs,
    measure: Measure,
    *,
    named: bool,
) -> go.Scatter:
    """Return the trace of a lineage over the rungs that it completed.

    Args:
        one: The lineage.
        words: Its structure in words.
        points: Rung, metric and whether the lineage was promoted.
        palette: Colours and symbols by structure.
        sizes: Launches of each rung.
        measure: The metric.
        named: Whether the trace gets an entry in the legend.
    """
    import plotly.graph_objects as go

    return go.Scatter(
        x=[index for index, *_ in points],
        y=[value * measure.scale for _, value, _ in points],
        mode="lines+markers",
        name=words,
        legendgroup=words,
        showlegend=named,
        line={"color": palette[words], "width": 1.5},
        marker={"size": 10, "symbol": [palette.symbol(words) + ("" if on else "-open") for _, _, on in points]},
        hovertext=[
            f"<b>{words}</b> (from trial {one.first_number})<br>"
            f"rung of {things_in_words(sizes.size(index), 'launch')}: {measure.shown(value)}, "
            f"{'goes on' if on else 'waits'}"
            for index, value, on in points
        ],
        hoverinfo="text",
    )
