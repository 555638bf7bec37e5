"""A stored study, put together again so that its winner can be explained."""

from __future__ import annotations

from optuna_dsat.errors import UsageError
from optuna_dsat.report.explanation import Explanation, explain
from optuna_dsat.store import Store
from optuna_dsat.study.methods import make_planner
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words

__all__ = ["explain_study"]


def explain_study(store: Store, name: str) -> tuple[Explanation, str]:
    """Return why a study's winner wins, and its configuration in words.

    Raises:
        UsageError: If there is no such study, nothing of it was measured, or its profile is gone.
    """
    study = read_stored(store, name)
    if study.profiled is None or study.best is None:
        raise UsageError(f"Nothing of the study {name!r} was measured: there is nothing to explain.")
    planner = make_planner(study.spec, study.profiled, study.space, prior_knowledge=study.prior_knowledge)
    found = explain(study.trials, planner=planner, winner=study.best, baseline=study.baseline)
    return found, config_in_words(study.best.trial.user_attrs[attributes.CONFIG])
