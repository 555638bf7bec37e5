"""Plots of a study as plotly figures, similar to ``optuna.visualization``.

Every ``plot_`` function takes a study that optuna-dsat made, as Optuna loads it or as a ``StudyView``:

    import optuna
    from optuna_dsat.report import figures

    study = optuna.load_study(study_name="train-asha", storage="sqlite:///optuna-dsat.db")
    figures.plot_metric(study).show()
    figures.plot_timeline(study).write_image("timeline.svg")  # needs plotly's kaleido

``plot_metric`` and ``plot_progress`` need the trials only, and take any Optuna study that uses
``optuna_dsat.samplers``. ``optuna.visualization.plot_param_importances`` plots the importance of the knobs. A figure
without data contains a sentence with the reason, which ``missing`` returns. Values are plain lists, so figures become
readable JSON for any version of plotly.js. No page colour is set, so figures suit light and dark pages.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from optuna_dsat.errors import UsageError
from optuna_dsat.report.figures._comparison import ComparedStudy, comparison_figure, course_figure
from optuna_dsat.report.figures._finalists import finalists_figure
from optuna_dsat.report.figures._memory import PREDICTED_AS_MEASURED, memory_figure
from optuna_dsat.report.figures._metric import BEST, CONFIRMED, EDGE, USER, metric_figure
from optuna_dsat.report.figures._scaling import AtCount, scaling_figure
from optuna_dsat.report.figures._search import progress_figure
from optuna_dsat.report.figures._source import Source, history_of, view_of
from optuna_dsat.report.figures._style import INK, missing, note_of
from optuna_dsat.report.figures._time import timeline_figure
from optuna_dsat.report.view import StudyView

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = [
    "BEST",
    "CONFIRMED",
    "EDGE",
    "INK",
    "PREDICTED_AS_MEASURED",
    "USER",
    "AtCount",
    "ComparedStudy",
    "comparison_figure",
    "course_figure",
    "memory_figure",
    "metric_figure",
    "missing",
    "note_of",
    "plot_finalists",
    "plot_memory",
    "plot_metric",
    "plot_progress",
    "plot_timeline",
    "require_plotly",
    "scaling_figure",
]


def require_plotly() -> None:
    """Raise if plotly is missing.

    Raises:
        UsageError: If it is not installed; the message explains how to install it.
    """
    if importlib.util.find_spec("plotly") is None:
        raise UsageError("plotly is not installed: pip install 'plotly>=6'")


def plot_metric(study: Source) -> go.Figure:
    """Plot the metric over the micro-batch (samples per GPU and pass): a line per lineage, with its memory limit.

    A lineage is a set of trials that differ in the micro-batch only. Throughput is in samples/s over all ranks,
    FLOPS_per_gpu in FLOP/s, times in ms. A cross marks the smallest micro-batch that ran out of memory.

    Args:
        study: Any Optuna study whose trials have a micro-batch, or a ``StudyView``.
    """
    require_plotly()
    history = history_of(study)
    return metric_figure(
        history.trials,
        metric=history.metric,
        winner=history.winner,
        maximize=history.maximize,
        confirmed=history.confirmed,
        device=history.device,
    )


def plot_progress(study: Source) -> go.Figure:
    """Plot the launches' metric in order of their end, the best so far, and the user's own config.

    These are values of the search; a star marks the config that rounds confirmed afterwards.

    Args:
        study: Any single-objective Optuna study, or a ``StudyView``.
    """
    require_plotly()
    history = history_of(study)
    return progress_figure(
        history.trials,
        metric=history.metric,
        maximize=history.maximize,
        confirmed=history.result,
        device=history.device,
    )


def plot_memory(study: Source) -> go.Figure:
    """Plot the measured peak memory per rank (GiB) over the peak that was predicted when the trial was proposed.

    Predictions come from the memory model, corrected by the launches finished by then; for ``guided``, its posterior.

    Args:
        study: A study that optuna-dsat made.

    Raises:
        UsageError: If it did not make it.
    """
    require_plotly()
    return memory_figure(view_of(study))


def plot_timeline(study: Source) -> go.Figure:
    """Plot the activity of each GPU (CPU rank) over the time of the search: start-up, steps, exit, idle.

    Times are wall time; pauses of the study are cut out and marked. Running launches are not drawn.

    Args:
        study: A study that optuna-dsat made.

    Raises:
        UsageError: If it did not make it.
    """
    require_plotly()
    view = view_of(study)
    return timeline_figure(view.launches, device=view.spec.device)


def plot_finalists(study: Source) -> go.Figure:
    """Plot the finalists, measured again with more steps, with their 95% confidence intervals.

    Args:
        study: A study that optuna-dsat made.

    Raises:
        UsageError: If it did not make it.
    """
    require_plotly()
    view = view_of(study)
    verdict = view.verdict
    finalists = (
        []
        if verdict is None
        else [verdict.in_rounds(contender.number) or contender for contender in verdict.contenders]
    )
    shown = [finalist for finalist in finalists if view.rounds.failure(finalist.number) is None]
    shown.sort(key=lambda item: -item.value if view.maximize else item.value)
    return finalists_figure(
        shown, best=view.best, metric=view.metric, why_none=_why_no_finalist(view), device=view.spec.device
    )


def _why_no_finalist(view: StudyView) -> str:
    if view.spec.confirm == 0:
        return "Nothing is measured again in this study (--confirm 0)."
    if view.end_reason is not None:
        return "No finalist could be measured again."
    if view.is_fruitless:
        return "Nothing was measured that could be measured again."
    return "Finalists are measured again when the search has ended; it has not."
