"""Publishes a study to optuna-dashboard: notes, plots, metric name, result.

Everything is kept in the study's own storage, so any optuna-dashboard shows it, regardless of how it was started.
Publishing again changes nothing unless the study has changed, and keeps text that users added below a note's last line.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.trial import Trial

from optuna_dsat.errors import UsageError
from optuna_dsat.escape.html import safe_figure
from optuna_dsat.escape.shell import install_command
from optuna_dsat.report.dashboard.notes import keep_own_text, study_note, trial_note
from optuna_dsat.report.figures import history_of, metric_figure, plot_memory
from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.store import Store
from optuna_dsat.store.retry import RetryingStorage
from optuna_dsat.study.confirm.words import verdict_in_words
from optuna_dsat.trials import attributes

METRIC_PLOT = "metric-over-micro-batch"
MEMORY_PLOT = "predicted-and-measured-memory"
"""Ids under which optuna-dashboard keeps the plots."""


class _CachedAttributes(RetryingStorage):
    """A storage that reads a study's system attributes once and skips writes that change nothing.

    optuna-dashboard keeps the notes of all trials in these attributes and reads all of them for every note.
    """

    def __init__(self, store: Store, study_id: int) -> None:
        super().__init__(store.storage, database=store.url)
        self._attributes = dict(store.storage.get_study_system_attrs(study_id))

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:  # noqa: ARG002 - there is one study
        """Return the attributes as last read or written."""
        return dict(self._attributes)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Write an attribute unless it is stored already."""
        if key not in self._attributes or self._attributes[key] != value:
            super().set_study_system_attr(study_id, key, value)
            self._attributes[key] = value


def is_installed() -> bool:
    """Return whether optuna-dashboard is installed."""
    return importlib.util.find_spec("optuna_dashboard") is not None


def require_installed() -> None:
    """Raise ``UsageError``, with how to install it, if optuna-dashboard is missing."""
    if not is_installed():
        raise UsageError(f"optuna-dashboard is not installed: {install_command('optuna-dsat[dashboard]')}")


def publish(store: Store, name: str) -> int:
    """Write a study's notes, plots and result for optuna-dashboard; return Optuna's id of the study.

    Raises:
        UsageError: If the study does not exist, or optuna-dashboard is not installed.
        StorageError: If the database fails for longer than the store's retry limit.
    """
    require_installed()
    view = read_view(store, name)
    cached = _CachedAttributes(store, store.storage.get_study_id_from_name(name))
    study = optuna.load_study(study_name=name, storage=cached)
    _save_note(study, study_note(view))
    for trial in view.launched:
        _save_note(Trial(study, trial._trial_id), trial_note(view, trial))
    _save_plots(study, view)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names([f"{view.metric} in the search"])
    _save_result(study, view)
    return study._study_id


def _save_result(study: optuna.Study, view: StudyView) -> None:
    """Write the result as a user attribute of the study, which the dashboard lists next to the best trial."""
    verdict = view.verdict
    words = "" if verdict is None else " ".join(verdict_in_words(verdict, metric=view.metric, device=view.spec.device))
    if words and study.user_attrs.get(attributes.RESULT) != words:
        study.set_user_attr(attributes.RESULT, words)


def _save_note(target: optuna.Study | Trial, text: str) -> None:
    from optuna_dashboard import get_note, save_note

    present: str = get_note(target)
    wanted = keep_own_text(text, present)
    if wanted != present:
        save_note(target, wanted)


def _save_plots(study: optuna.Study, view: StudyView) -> None:
    from optuna_dashboard import save_plotly_graph_object

    figures = {METRIC_PLOT: metric_figure(history_of(view))}
    if view.profiled is not None:
        figures[MEMORY_PLOT] = plot_memory(view)
    for name, figure in figures.items():
        safe = type(figure)(safe_figure(figure.to_plotly_json()), skip_invalid=True)
        save_plotly_graph_object(study, safe, graph_object_id=name)
