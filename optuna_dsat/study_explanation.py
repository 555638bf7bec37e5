"""A stored study, put together again so that its winner can be explained."""

from __future__ import annotations

from optuna.trial import FrozenTrial

from optuna_dsat import history
from optuna_dsat.errors import UsageError
from optuna_dsat.experience import Experience
from optuna_dsat.explanation import Explanation, explain
from optuna_dsat.methods import make_foresight
from optuna_dsat.profiling import Profiled
from optuna_dsat.script_trainer import follow_trainer
from optuna_dsat.spec import StudySpec
from optuna_dsat.store import Store
from optuna_dsat.study_space import space_of
from optuna_dsat.words import config_in_words

__all__ = ["explain_study"]


def explain_study(store: Store, name: str) -> tuple[Explanation, str]:
    """Return why a study's winner wins, and its configuration in words.

    Raises:
        UsageError: If nothing of the study was measured, or its profile is gone.
        ValueError: If there is no such study.
    """
    record = store.find_study(name)
    if record is None:
        raise ValueError(f"there is no study {name!r}")
    study_id = store.storage.get_study_id_from_name(name)
    attributes = store.storage.get_study_user_attrs(study_id)
    trials = store.storage.get_all_trials(study_id, deepcopy=False)
    stored = store.find_profile(str(attributes.get(history.FINGERPRINT)))
    spec = StudySpec.model_validate(dict(record.spec))
    measured = history.best_trials(trials, maximize=spec.direction == "maximize")
    if stored is None or not measured:
        raise UsageError(f"Nothing of the study {name!r} was measured: there is nothing to explain.")
    profiled = Profiled.from_json(stored.profile)
    spec = follow_trainer(spec, profiled.trainer)
    known = attributes.get(history.WARM_START)
    foresight = make_foresight(
        spec, profiled, space_of(spec, profiled), experience=Experience.from_json(known) if known else None
    )
    winner = _winner(measured, attributes.get(history.WINNER))
    finalists = attributes.get(history.FINALISTS, [])
    confirmed = {one["number"]: one["value"] for one in finalists if one["value"] is not None}
    found = explain(trials, foresight=foresight, winner=winner, confirmed=confirmed)
    return found, config_in_words(winner.user_attrs[history.CONFIG])


def _winner(measured: list[FrozenTrial], number: int | None) -> FrozenTrial:
    """Return the trial that was confirmed as the winner, else the best so far."""
    return next((trial for trial in measured if trial.number == number), measured[0])
