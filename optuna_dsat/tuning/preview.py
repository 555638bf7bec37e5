"""Preview of a search without a launch: its space, its profile launch and sample configurations."""

from __future__ import annotations

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

__all__ = ["preview"]

_SAMPLES = 3


def preview(spec: StudySpec) -> tuple[SearchSpace, dict[str, Any]]:
    """Return the space of a search that is not started, and its preview as plain values.

    Bucket sizes are not capped by the model's size yet. The samples are DeepSpeed configs drawn at random from the
    space, without a micro-batch.
    """
    space = space_of(spec, None)
    with quiet_optuna():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=spec.random_seed))
        drawn = [space.overlay(space.suggest(study.ask())) for _ in range(_SAMPLES)]
    samples = [ds_config.merge(ds_config.effective(spec.ds_config), overlay) for overlay in drawn]
    for sample in samples:
        sample.pop(ds_config.MICRO_BATCH, None)
    attempts = list(profile_attempts(spec))
    return space, {
        "study": spec.name,
        "space": [
            {"knob": row.knob, "role": row.role, "applies": row.where, "choices": list(row.choices)}
            for row in space.describe()
        ],
        "profile_launch": {
            "micro_batch": attempts[0].micro_batch,
            "attempts": [attempt.words for attempt in attempts],
        },
        "baseline": _user_config_in_words(spec),
        "samples": samples,
    }


def _user_config_in_words(spec: StudySpec) -> str:
    if not spec.script.config_path:
        return "what your script passes to DeepSpeed; the profile launch reads it"
    config = ds_config.effective(spec.ds_config)
    if all(config.get(key) in (None, ds_config.AUTO) for key in (ds_config.TRAIN_BATCH, ds_config.MICRO_BATCH)):
        return f"{Structure.of(config).words}, at the micro-batch that your script sets; the profile launch reads it"
    own, _ = user_config(spec)
    return config_in_words(own)
