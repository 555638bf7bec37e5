"""The source of a figure: a study that optuna-dsat made, or any Optuna study that uses its samplers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from optuna_dsat.errors import UsageError
from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.store import Store
from optuna_dsat.store.registry import STUDY_UUID
from optuna_dsat.trials import attributes

__all__ = ["History", "Source", "history_of", "view_of"]

Source = StudyView | optuna.Study
"""What every ``plot_`` function takes."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The trials of a study with their metric and its direction, for figures that need no launches."""

    trials: tuple[FrozenTrial, ...]
    metric: str
    """Name of the metric; ``value`` if the study does not name one."""
    maximize: bool
    attributes: Mapping[str, Any]
    """User attributes of the study."""

    @property
    def direction(self) -> StudyDirection:
        """Direction in which the metric improves."""
        return StudyDirection.MAXIMIZE if self.maximize else StudyDirection.MINIMIZE

    @property
    def winner(self) -> int | None:
        """Number of the winning trial; None while there is none."""
        return self.attributes.get(attributes.WINNER)


def history_of(source: Source) -> History:
    """Return the trials of any Optuna study."""
    if not isinstance(source, StudyView) and STUDY_UUID in source.user_attrs:
        source = view_of(source)
    if isinstance(source, StudyView):
        return History(
            trials=source.trials, metric=source.metric, maximize=source.maximize, attributes=source.attributes
        )
    return History(
        trials=tuple(source.get_trials(deepcopy=False)),
        metric=(source.metric_names or ["value"])[0],
        maximize=source.direction == StudyDirection.MAXIMIZE,
        attributes=source.user_attrs,
    )


def view_of(source: Source) -> StudyView:
    """Return a study with its spec, profile and launches.

    Raises:
        UsageError: If optuna-dsat did not make the study, or it is not in a database.
    """
    if isinstance(source, StudyView):
        return source
    if STUDY_UUID not in source.user_attrs:
        raise UsageError(
            f"The study {source.study_name!r} was not made by optuna-dsat: it has trials, but neither a profile nor "
            "launches. plot_metric, plot_progress, plot_outcomes, plot_micro_batches and plot_importances show it."
        )
    url = _url_of(source._storage)
    if url is None:
        raise UsageError(
            f"The storage of the study {source.study_name!r} is not a database; read it with "
            "optuna_dsat.report.view.read_view(store, name) and give that."
        )
    with Store.open(url, create=False) as store:
        return read_view(store, source.study_name)


def _url_of(storage: BaseStorage) -> str | None:
    """Return the URL of a storage's database, also of a wrapped storage; None if it has none."""
    seen: Any = storage
    while seen is not None:
        engine = getattr(seen, "engine", None)
        if engine is not None:
            return str(engine.url.render_as_string(hide_password=False))
        seen = getattr(seen, "_storage", None) or getattr(seen, "_backend", None)
    return None
