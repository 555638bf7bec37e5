"""The best configuration of a study and its description in reports."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.report.markdown import redacted
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.command import without_secrets
from optuna_dsat.secrecy.references import shell_join
from optuna_dsat.study.command import command_to_train
from optuna_dsat.study.config_changes import Change, config_changes, trainable_config
from optuna_dsat.study.confirm.rows import configuration_of
from optuna_dsat.study.confirm.standing import Standing
from optuna_dsat.study.confirm.words import how_known, verdict_in_words
from optuna_dsat.study.profile.script import own_train_batch_size, user_config
from optuna_dsat.study.result import best_settings, learning_rate_advice
from optuna_dsat.study.space import epoch_samples
from optuna_dsat.trials import attributes

__all__ = ["Winner", "winner_of"]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The configuration selected by the verdict; before a confirmation the best of the search."""

    standing: Standing
    words: str
    ended: bool
    """Whether the search has ended."""
    told: tuple[str, ...]
    """The verdict as sentences: certainty, speed-ups, ties, noise, warnings."""
    how_known: str
    """Source of the metric as text: rounds or the search."""
    is_own: bool
    """Whether the winner is the user's own config."""
    config: Mapping[str, Any]
    """The DeepSpeed config, ready to train with, without secrets."""
    changes: tuple[Change, ...]
    """Differences from the user's own config."""
    command: str
    """The command that trains with it, without secrets."""
    advice: tuple[str, ...]
    """Advice for its use: learning rate, changes of the script."""
    speed_up: float | None
    """Speed-up over the user's own config; None if the latter was not measured."""
    speed_up_low: float | None
    """Lower end of its 95% interval, paired in rounds; None if rounds did not measure it."""
    speed_up_high: float | None
    """Its upper end."""


def winner_of(view: StudyView) -> Winner | None:
    """Return the best configuration of a study; None before anything was measured."""
    best, verdict = view.best, view.verdict
    if best is None or verdict is None:
        return None
    spec = view.spec
    ranks = attributes.data_parallel_size(best.trial, slots=spec.slots_per_trial)
    complete, config = view.complete_config(best.trial), view.ready_config(best.trial)
    own = trainable_config(user_config(spec, data_parallel_size=ranks)[0], world_size=ranks)
    command = command_to_train(
        spec,
        complete,
        profiled=view.profiled,
        host_threads=best.trial.user_attrs.get(attributes.HOST_THREADS),
        storage=view.storage_url,
    )
    rate = learning_rate_advice(
        config,
        batch=complete[ds_config.TRAIN_BATCH],
        user_batch=own_train_batch_size(spec, ranks=ranks),
        samples=epoch_samples(spec, view.profiled),
        is_chosen=complete[ds_config.TRAIN_BATCH] == spec.train_batch_size,
    )
    script = _advice(view, complete)
    ratio = verdict.speed_up
    return Winner(
        standing=best,
        words=configuration_of(best.trial),
        ended=view.end_reason is not None,
        told=tuple(verdict_in_words(verdict, metric=view.metric, device=view.spec.device)),
        how_known=how_known(verdict),
        is_own=best.trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG,
        config=redacted(config),
        changes=config_changes(redacted(own), redacted(complete)),
        command=shell_join(without_secrets(shlex.split(command))),
        advice=tuple(text for text in (rate, script) if text),
        speed_up=None if ratio is None else ratio.value,
        speed_up_low=None if ratio is None else ratio.low,
        speed_up_high=None if ratio is None else ratio.high,
    )


def _advice(view: StudyView, config: Mapping[str, Any]) -> str:
    """Return advice on changes of the script or its settings."""
    if view.profiled is None:
        return ""
    copied = best_settings(view.spec, config, view.spec.study_dir)
    return view.profiled.advice(config, settings_written=copied is not None and copied.sets_batch)
