"""Where a study stands when its search begins or goes on, for whoever watches."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial

from optuna_dsat.study.finalists import confirmation_end
from optuna_dsat.study.progress import BestSoFar, SearchStarted
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes

__all__ = ["best_so_far", "search_started"]


def search_started(
    spec: StudySpec, trials: Sequence[FrozenTrial], *, metric: str, maximize: bool, total_slots: int
) -> SearchStarted:
    """Return the news that a search begins.

    Args:
        spec: The study.
        trials: Its trials so far.
        metric: The metric that is optimised.
        maximize: Whether a larger metric is better.
        total_slots: Slots of the launcher.
    """
    user = attributes.user_config_trial(trials)
    return SearchStarted(
        study=spec.name,
        metric=metric,
        maximize=maximize,
        max_trials=spec.max_trials,
        launched=attributes.launches_used(trials),
        side_by_side=_side_by_side(spec, total_slots),
        finalists=spec.confirm + spec.enqueue_user_config if spec.confirm else 0,
        finalist_steps=confirmation_end(spec) / spec.end_profile_step,
        timeout_s=spec.timeout_s,
        best=best_so_far(trials, maximize=maximize),
        user_value=None if user is None else user.values[0],
    )


def _side_by_side(spec: StudySpec, total_slots: int) -> int:
    """Return how many launches may be in flight at once."""
    slots = total_slots if spec.max_slots is None else min(total_slots, spec.max_slots)
    return max(1, min(spec.max_concurrent_trials, slots // spec.slots_per_trial))


def best_so_far(trials: Sequence[FrozenTrial], *, maximize: bool) -> BestSoFar | None:
    """Return the best measured trial, None where there is none."""
    best = attributes.best_trials(trials, maximize=maximize)
    if not best:
        return None
    attrs = best[0].user_attrs
    return BestSoFar(
        number=best[0].number,
        words=attrs.get(attributes.CONFIGURATION, ""),
        value=best[0].values[0],
        samples_per_s=attrs.get(attributes.METRICS, {}).get("throughput"),
    )
