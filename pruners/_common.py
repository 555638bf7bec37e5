"""Code shared by the pruners: origin of a trial, and lineage of a trial."""

from __future__ import annotations

from collections.abc import Mapping

from optuna.trial import FrozenTrial

from optuna_dsat.trials.lineage import RETRY_ATTR, Lineage, group

__all__ = ["chosen_by_user", "lineage_of"]


def chosen_by_user(trial: FrozenTrial) -> bool:
    """Return whether a trial was enqueued or is the retry of a lost trial; pruners never veto such a trial."""
    return bool(trial.system_attrs.get("fixed_params")) or RETRY_ATTR in trial.system_attrs


def lineage_of(trial: FrozenTrial, lineages: Mapping[str, Lineage], *, micro_batch: str) -> Lineage | None:
    """Return the lineage of a trial, without trials if it is the first; None if the trial has no micro-batch."""
    own = next(iter(group([trial], micro_batch=micro_batch).values()), None)
    if own is None:
        return None
    empty = Lineage(key=own.key, params=own.params, trials=(), micro_batch=micro_batch)
    return lineages.get(own.key, empty)
