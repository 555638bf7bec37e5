"""The metric over the micro-batch as the models of a study predict it: the posterior of ``guided``, for any method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION
from optuna_dsat.guided.acquisition import Prediction
from optuna_dsat.report.figures._style import lineage_words
from optuna_dsat.report.view import StudyView
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, lineage_key, visible_params

_MOST_CURVES = 4
"""Structures with a curve: the fastest, and the structure of the user's config in any case."""
_MOST_SIZES, _MOST_POINTS = 400, 60
"""Micro-batches at which a structure is predicted, and which of these a curve connects."""
_BEYOND = 1.5
"""Largest predicted micro-batch, relative to the largest launched."""
_FITS = 0.5
"""Least probability to fit within the memory edge."""
_Z95 = 1.96
"""Half-width of the central 95% of a normal distribution, in standard deviations."""


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
    asked = [(_lineage(trial), int(size)) for trial in chosen for size in sizes]
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
    own = None if user is None else lineage_words([user])
    first = [words for words in best if words != own][: _MOST_CURVES - (own in best)]
    return [trial for words, trial in best.items() if words in first or words == own]


def _lineage(trial: FrozenTrial) -> Mapping[str, Any]:
    """Return the knobs by which the models know a lineage."""
    outside = (MICRO_BATCH, GRADIENT_ACCUMULATION)
    return {name: value for name, value in visible_params(trial).items() if name not in outside}


def _curve(trial: FrozenTrial, predicted: Sequence[tuple[int, Prediction | None]]) -> Curve | None:
    """Return the curve of a trial's lineage by (micro-batch, prediction); None if at most one micro-batch fits."""
    known = [(size, item) for size, item in predicted if item is not None and item.fits >= _FITS]
    if len(known) < 2:
        return None
    shown = [*known[: -1 : math.ceil(len(known) / _MOST_POINTS)], known[-1]]
    low, value, high = (
        tuple(_rounded(item.value * math.exp(sigmas * item.spread)) for _, item in shown) for sigmas in (-_Z95, 0, _Z95)
    )
    return Curve(
        words=lineage_words([trial]),
        lineage=lineage_key(_lineage(trial)),
        sizes=tuple(size for size, _ in shown),
        values=value,
        low=low,
        high=high,
        edge=known[-1][0] if known[-1][0] < predicted[-1][0] else None,
    )


def _rounded(value: float) -> float:
    """Return a value to five digits, which is finer than a figure and keeps the page small."""
    return float(f"{value:.5g}")
