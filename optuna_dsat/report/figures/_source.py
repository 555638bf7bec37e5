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
from optuna_dsat.report.figures._style import Measure
from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.store import Store
from optuna_dsat.store.registry import STUDY_UUID
from optuna_dsat.study.confirm.verdict import Verdict

Source = StudyView | optuna.Study
"""Argument type of every ``plot_`` function."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The trials of a study with their metric and its direction, for figures that need no launches."""

    trials: tuple[FrozenTrial, ...]
    metric: str
    """Name of the metric; ``value`` if the study has no metric name."""
    maximize: bool
    verdict: Verdict | None
    """Current outcome of the study; None if nothing was measured, or optuna-dsat did not create the study."""
    device: str = ""
    """Device of a rank, ``cuda`` or ``cpu``; empty if optuna-dsat did not create the study."""
    view: StudyView | None = None
    """The study; None if optuna-dsat did not create it."""

    @property
    def winner(self) -> int | None:
        """Number of the resulting trial; None without a verdict."""
        return None if self.verdict is None else self.verdict.result.number

    @property
    def confirmed(self) -> Mapping[int, float]:
        """Trial -> its metric in rounds; empty if no rounds decided."""
        measured = {} if self.verdict is None else self.verdict.measured
        return {number: contender.value for number, contender in measured.items() if contender.rounds}

    @property
    def result(self) -> tuple[int, float] | None:
        """Trial and metric that rounds confirmed; None if no rounds decided."""
        verdict = self.verdict
        return (verdict.result.number, verdict.result.value) if verdict is not None and verdict.is_by_rounds else None


def measure_of(history: History) -> Measure:
    """Return how figures and tables show the metric of a study: FLOPS as samples/s, if these are known."""
    best = None if history.view is None else history.view.best
    rates = {} if best is None else best.metrics
    if history.metric == "FLOPS_per_gpu" and rates.get("throughput") and rates.get(history.metric):
        return Measure("throughput", history.device, rates["throughput"] / rates[history.metric])
    return Measure(history.metric, history.device)


def history_of(source: Source) -> History:
    """Return the trials of any Optuna study."""
    if not isinstance(source, StudyView) and STUDY_UUID in source.user_attrs:
        source = view_of(source)
    if isinstance(source, StudyView):
        return History(
            trials=source.trials,
            metric=source.metric,
            maximize=source.maximize,
            verdict=source.verdict,
            device=source.spec.device,
            view=source,
        )
    return History(
        trials=tuple(source.get_trials(deepcopy=False)),
        metric=(source.metric_names or ["value"])[0],
        maximize=source.direction == StudyDirection.MAXIMIZE,
        verdict=None,
    )


def view_of(source: Source) -> StudyView:
    """Return a study with its spec, profile and launches; ``UsageError`` if optuna-dsat did not make it."""
    if isinstance(source, StudyView):
        return source
    if STUDY_UUID not in source.user_attrs:
        raise UsageError(
            f"The study {source.study_name!r} was not made by optuna-dsat: it has trials, but neither a profile nor "
            "launches. plot_metric and plot_progress show it."
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
    """Return the URL of a storage's database, also of a wrapped storage; None without a database."""
    seen: Any = storage
    while seen is not None:
        engine = getattr(seen, "engine", None)
        if engine is not None:
            return str(engine.url.render_as_string(hide_password=False))
        seen = getattr(seen, "_storage", None) or getattr(seen, "_backend", None)
    return None
