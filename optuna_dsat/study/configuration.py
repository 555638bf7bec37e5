"""The configuration of a trial in words."""

from __future__ import annotations

from optuna.trial import FrozenTrial

from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words

__all__ = ["configuration_of"]


def configuration_of(trial: FrozenTrial) -> str:
    """Return a launched trial's configuration in words, with the knobs that differ from the user's own."""
    stored = trial.user_attrs.get(attributes.CONFIGURATION)
    return str(stored) if stored else config_in_words(trial.user_attrs[attributes.CONFIG])
