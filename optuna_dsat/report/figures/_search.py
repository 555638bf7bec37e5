"""The progress of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from optuna.trial import FrozenTrial

from optuna_dsat.outcome import Outcome
from optuna_dsat.report.figures._metric import BEST, CONFIRMED, USER
from optuna_dsat.report.figures._source import Source, history_of, measure_of
from optuna_dsat.report.figures._style import INK, NEUTRAL, OUTCOME_COLOURS, Measure, empty_figure, lay_out, new_figure
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import Feasibility, feasibility, score
from optuna_dsat.words import config_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

BEST_SO_FAR = "best so far in the search"
_NO_TRIAL = "No trial has ended yet."
_FEW_LAUNCHES = 10
"""Maximum number of launches for which every integer of the axis has a tick, to avoid fractional ticks."""


def _ended(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the finished launches in order of their end; lost launches are left out."""
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


def plot_progress(study: Source) -> go.Figure:
    """Plot the launches' metric in order of their end, the best so far, and the user's own config.

    These are values of the search; a star marks the config that rounds confirmed afterwards.

    Args:
        study: Any single-objective Optuna study, or a ``StudyView``.
    """
    history = history_of(study)
    title, x_title, measure = "Progress of the search", "trials that ended", measure_of(history)
    trials, confirmed = history.trials, history.result
    ended, scale = _ended(trials), measure.scale
    if not ended:
        return empty_figure(_NO_TRIAL, title=title, x=x_title, y=measure.title)
    if not any(_outcome(trial) is Outcome.MEASURED for trial in ended):
        return empty_figure("Nothing has been measured yet.", title=title, x=x_title, y=measure.title)
    if len(ended) == 1:
        return empty_figure("One trial has ended.", title=title, x=x_title, y=measure.title)
    places = {trial.number: place for place, trial in enumerate(ended, start=1)}
    figure = new_figure()
    for outcome in Outcome:
        if members := [trial for trial in ended if _outcome(trial) is outcome]:
            _add_outcome(figure, outcome, members, places, measure)
    best = _best_so_far(ended, maximize=history.maximize)
    if best:
        figure.add_scatter(
            x=[place for place, _ in best],
            y=[value * scale for _, value in best],
            mode="lines",
            name=BEST_SO_FAR,
            line={"color": INK, "width": 1.5, "shape": "hv"},
            hoverinfo="skip",
        )
    user = attributes.user_config_trial(trials)
    if user is not None:
        line = {"color": NEUTRAL, "dash": "dash", "width": 1.5}
        values = [user.values[0] * scale] * 2
        name = f"{USER} in the search"
        figure.add_scatter(x=[1, len(ended)], y=values, mode="lines", name=name, line=line, hoverinfo="name")
    if confirmed is not None:
        number, value = confirmed
        figure.add_scatter(
            x=[len(ended) + 1],
            y=[value * scale],
            mode="markers",
            name=f"{BEST}{CONFIRMED}",
            marker={"symbol": "star", "size": 13, "color": INK},
            hovertext=[f"trial {number}, in rounds: {measure.shown(value)}"],
            hoverinfo="text",
        )
    lay_out(figure, title=title, x=x_title, y=measure.title)
    figure.update_yaxes(rangemode="tozero", tickformat=measure.ticks)
    if len(ended) <= _FEW_LAUNCHES:
        figure.update_xaxes(dtick=1)
    return figure


def _add_outcome(
    figure: go.Figure, outcome: Outcome, trials: Sequence[FrozenTrial], places: Mapping[int, int], measure: Measure
) -> None:
    """Add the launches with a given outcome; launches without a metric are drawn on the axis."""
    values = [score(t) for t in trials]
    figure.add_scatter(
        x=[places[t.number] for t in trials],
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
            for t, value in zip(trials, values, strict=True)
        ],
        hoverinfo="text",
    )


def _best_so_far(ended: Sequence[FrozenTrial], *, maximize: bool) -> list[tuple[int, float]]:
    """Return (place, best metric so far) from the first measured launch to the last launch."""
    result: list[tuple[int, float]] = []
    for place, trial in enumerate(ended, start=1):
        value = score(trial) if trial.state.name == "COMPLETE" else None
        before = result[-1][1] if result else None
        if value is not None and (before is None or (value > before) == maximize):
            before = value
        if before is not None:
            result.append((place, before))
    return result
