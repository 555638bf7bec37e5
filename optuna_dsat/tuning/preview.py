"""Preview of a search without a launch: its space, its profile launch and sample configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna

from optuna_dsat.config import ds_config
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.config.structures import Structure
from optuna_dsat.study.profile.profile import profile_attempts
from optuna_dsat.study.profile.script import user_config
from optuna_dsat.study.space import space_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.tuning.run import quiet_optuna
from optuna_dsat.words import config_in_words

__all__ = ["Preview", "preview"]

_SAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Preview of a search that is not started."""

    space: SearchSpace
    """Search space; bucket sizes are not capped by the model's size yet."""
    profile_micro_batch: int
    profile_attempts: Sequence[str]
    """Descriptions of the profile launch's ZeRO structures: the first, then the fallbacks when out of memory."""
    user_config: str
    """Description of the known part of the user's DeepSpeed config before the script runs."""
    samples: Sequence[Mapping[str, Any]]
    """DeepSpeed configs drawn at random from the space, without a micro-batch."""


def preview(spec: StudySpec) -> Preview:
    """Return a preview of the search of a spec."""
    space = space_of(spec, None)
    with quiet_optuna():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=spec.random_seed))
        drawn = [space.overlay(space.suggest(study.ask())) for _ in range(_SAMPLES)]
    samples = [ds_config.merge(ds_config.effective(spec.ds_config), overlay) for overlay in drawn]
    for sample in samples:
        sample.pop(ds_config.MICRO_BATCH, None)
    attempts = list(profile_attempts(spec))
    return Preview(
        space=space,
        profile_micro_batch=attempts[0].micro_batch,
        profile_attempts=[attempt.words for attempt in attempts],
        user_config=_user_config_in_words(spec),
        samples=samples,
    )


def _user_config_in_words(spec: StudySpec) -> str:
    if not spec.script.config_path:
        return "what your script passes to DeepSpeed; the profile launch reads it"
    config = ds_config.effective(spec.ds_config)
    if all(config.get(key) in (None, ds_config.AUTO) for key in (ds_config.TRAIN_BATCH, ds_config.MICRO_BATCH)):
        return f"{Structure.of(config).words}, at the micro-batch that your script sets; the profile launch reads it"
    own, _ = user_config(spec)
    return config_in_words(own)
