"""The importance of the knobs for the metric."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import optuna
from optuna.distributions import IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.escape.html import figure_text
from optuna_dsat.report.figures._style import empty_figure, lay_out
from optuna_dsat.words import share_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["importances_figure", "importances_of"]

_LEAST_MEASURED = 10
"""With fewer measured trials the evaluator's quantiles consist of single trials."""
_LINE_CHARS = 24
"""Characters of a line of a knob's name."""


def importances_of(trials: Sequence[FrozenTrial], direction: StudyDirection) -> Mapping[str, float] | str:
    """Return the importance of every knob that took more than one value, largest first; or why there is none.

    By Optuna's default evaluator, PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255): how much the distribution of a
    knob's values among the best tenth of the measured trials differs from that among all of them. Shares sum up to 1.
    Trials that ran out of memory or were stopped have no value and do not count, so a knob that decides *what fits*
    shows here only as far as larger micro-batches are faster. The micro-batch's bounds differ from trial to trial; they
    are widened to one range first.

    Args:
        trials: The study's trials.
        direction: The direction of the metric.
    """
    measured = [t for t in trials if t.state is TrialState.COMPLETE and t.params]
    if len(measured) < _LEAST_MEASURED:
        return (
            f"The importance of knobs needs at least {_LEAST_MEASURED} measured configurations; "
            f"this study has {len(measured)}."
        )
    varied = [
        name
        for name in dict.fromkeys(name for t in measured for name in t.params)
        if len({t.params[name] for t in measured if name in t.params}) > 1
    ]
    if len(varied) < 2:
        return "Fewer than two knobs took more than one value among the measured configurations."
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about few trials in a quantile, and about experimental features
            study = optuna.create_study(direction=direction)
            study.add_trials(_with_common_ranges(measured))
            found = optuna.importance.get_param_importances(study, params=varied)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _with_common_ranges(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return copies without attributes whose integer parameters have one distribution each."""
    ranges: dict[str, tuple[int, int]] = {}
    for trial in trials:
        for name, distribution in trial.distributions.items():
            if isinstance(distribution, IntDistribution):
                value = int(trial.params[name])
                low, high = ranges.get(name, (value, value))
                ranges[name] = min(low, distribution.low, value), max(high, distribution.high, value)
    copies = []
    for trial in trials:
        distributions = {
            name: IntDistribution(*ranges[name]) if name in ranges else distribution
            for name, distribution in trial.distributions.items()
        }
        one = copy.copy(trial)
        one.distributions = distributions
        one.user_attrs, one.intermediate_values = {}, {}
        copies.append(one)
    return copies


def _over_lines(name: str) -> str:
    """Return a knob's name broken after underscores."""
    parts = name.replace("_", "_ ").split(" ")
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > _LINE_CHARS:
            lines.append("")
        lines[-1] += part
    return "<br>".join(map(figure_text, lines))


def importances_figure(trials: Sequence[FrozenTrial], direction: StudyDirection) -> go.Figure:
    """Return the importance of the knobs as bars, largest first. See ``importances_of``."""
    import plotly.graph_objects as go

    title, x = "Importance of the knobs", "share of the differences in speed"
    found = importances_of(trials, direction)
    if isinstance(found, str):
        return empty_figure(found, title=title, x=x)
    names = [name for name in found if found[name] > 0]
    alike = [name for name in found if name not in names]
    figure = go.Figure(
        go.Bar(
            x=[found[name] for name in names],
            y=[_over_lines(name) for name in names],
            orientation="h",
            marker={"color": "#0072B2"},
            text=[share_in_words(found[name]) for name in names],
            textposition="auto",
            textangle=0,
            hovertemplate="%{y}: %{x:.1%}<extra></extra>",
            showlegend=False,
        )
    )
    note = f"no difference was found in {', '.join(map(figure_text, alike))}" if alike else ""
    lay_out(figure, title=title, note=note, x=x, y="", height=120 + 38 * len(names))
    figure.update_xaxes(tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure
