"""Settings that change numbers (``--allow lossy``): which trials have them, and whether these may be the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.config.differences import lossy_settings
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.words import knob_in_words


def lossy_of(trial: FrozenTrial, spec: StudySpec) -> dict[str, Any]:
    """Return the settings of a trial that change numbers, as of ``lossy_settings``; empty if none is allowed."""
    allowed = "lossy" in (spec.allow or ()) and attributes.CONFIG in trial.user_attrs
    return lossy_settings(trial.user_attrs[attributes.CONFIG], spec.ds_config) if allowed else {}


def may_be_result(trial: FrozenTrial, rounds: Rounds, spec: StudySpec) -> bool:
    """Return whether a trial changes no numbers, or its losses were compared and agree."""
    settings = lossy_of(trial, spec)
    checked = rounds.checked(settings)
    return not settings or (checked is not None and checked.agrees)


def lossy_in_words(trials: Sequence[FrozenTrial], rounds: Rounds, spec: StudySpec) -> str:
    """Return the settings of trials that change numbers, with the comparison of their losses; empty without any."""
    texts = []
    for trial in trials:
        settings = lossy_of(trial, spec)
        if (checked := rounds.checked(settings)) is not None:
            texts.append(f"Trial {trial.number} changes numbers ({_settings(settings)}). {checked.check['message']}")
    return " ".join(dict.fromkeys(texts))


def rejected_in_words(rounds: Rounds) -> str:
    """Return the settings whose losses do not agree with those of the user's config; empty without any."""
    return " ".join(
        f"No result has {_settings(checked.settings)}: trial {checked.number} was compared. {checked.check['message']}"
        for checked in rounds.losses
        if not checked.agrees
    )


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(knob_in_words(name, value) for name, value in settings.items())
