"""The best configuration of a study, with what reports say about it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.launch.run_directory import without_secrets
from optuna_dsat.report.markdown import redacted
from optuna_dsat.report.view import StudyView
from optuna_dsat.study.result import BEST_CONFIG, learning_rate_advice, trainable_config, training_command
from optuna_dsat.study.standing import Standing
from optuna_dsat.study.user_config import user_config
from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words

__all__ = ["Change", "Winner", "winner_of"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs between the best config and the user's own."""

    key: str
    """Dotted key of the config."""
    own: str
    """The user's value as JSON; empty if it is not set."""
    best: str
    """The best config's value as JSON; empty if it is not set."""


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The best configuration so far; the winner, once the search has ended."""

    standing: Standing
    words: str
    confirmed: bool
    """Whether the search has ended: then it is the winner."""
    is_own: bool
    """Whether it is the user's own config."""
    config: Mapping[str, Any]
    """The DeepSpeed config, ready to train with, without secrets."""
    changes: tuple[Change, ...]
    """How it differs from the user's own."""
    command: str
    """The command that trains with it, without secrets."""
    command_names_config: bool
    """Whether the command names the config; otherwise the script has to be changed to read it."""
    advice: tuple[str, ...]
    """What to change with it: learning rate, arguments of the script."""
    speed_up: float | None
    """Over the user's own config; None if that was not measured."""
    speed_up_low: float | None
    """At the unfavourable ends of both 95 % intervals; None if one of the two was not confirmed."""
    speed_up_high: float | None
    """At the favourable ends."""


def winner_of(view: StudyView) -> Winner | None:
    """Return the best configuration of a study; None before anything was measured."""
    best = view.best
    if best is None:
        return None
    spec, trainer = view.spec, view.trainer
    ranks = attributes.data_parallel_size(best.trial, slots=spec.slots_per_trial)
    complete, config = view.complete_config(best.trial), view.ready_config(best.trial)
    own = trainable_config(user_config(spec, data_parallel_size=ranks)[0], world_size=ranks)
    launcher = view.profiled is not None and view.profiled.deepspeed_launcher
    command, names_config = training_command(
        spec,
        complete,
        spec.study_dir / BEST_CONFIG,
        deepspeed_launcher=launcher,
        host_threads=best.trial.user_attrs.get(attributes.HOST_THREADS),
    )
    rate = learning_rate_advice(config, batch=complete[ds_config.TRAIN_BATCH], user_batch=own[ds_config.TRAIN_BATCH])
    script = "" if trainer is None else trainer.advice(complete)
    low, high = _speed_up_range(view, best)
    return Winner(
        standing=best,
        words=config_in_words(best.trial.user_attrs[attributes.CONFIG]),
        confirmed=view.end_reason is not None,
        is_own=best.trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG,
        config=redacted(config),
        changes=tuple(_changes(redacted(own), redacted(complete))),
        command=shlex.join(without_secrets(shlex.split(command))),
        command_names_config=names_config,
        advice=tuple(text for text in (rate, script) if text),
        speed_up=view.speed_up(best),
        speed_up_low=low,
        speed_up_high=high,
    )


def _speed_up_range(view: StudyView, best: Standing) -> tuple[float | None, float | None]:
    """Return the speed-up at the unfavourable and at the favourable ends of both intervals."""
    user = view.baseline
    if user is None or not best.low or not best.high or not user.low or not user.high:
        return None, None
    if view.maximize:
        return best.low / user.high, best.high / user.low
    return user.low / best.high, user.high / best.low


def _changes(own: Mapping[str, Any], best: Mapping[str, Any]) -> Iterator[Change]:
    before, after = _given(own), _given(best)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield Change(key=key, own=_shown(before, key), best=_shown(after, key))


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key -> value of a config, without nulls."""
    return {key: value for key, value in ds_config.flatten(config).items() if value is not None}


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else ""
