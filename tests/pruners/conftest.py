"""Trials and studies written by hand, one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH

SPACE: dict[str, BaseDistribution] = {
    "zero_stage": CategoricalDistribution([1, 2, 3]),
    "offload_optimizer": CategoricalDistribution(["none", "cpu"]),
    "bucket": CategoricalDistribution([0, 1, 2, 3, 4, 5, 6, 7]),
    MICRO_BATCH: IntDistribution(1, 64, log=True),
}
OOM = "oom"
BROKEN = "broken"


def trial(size: int, result: float | str | Sequence[float], /, **knobs: Any) -> FrozenTrial:
    """A finished trial: its value, ``oom``, ``broken``, or the reports of one that was stopped."""
    params = {"zero_stage": 1, **knobs, MICRO_BATCH: size}
    state, outcome, value, reports = TrialState.COMPLETE, "measured", None, {}
    if result == OOM:
        state, outcome = TrialState.PRUNED, "out_of_memory"
    elif result == BROKEN:
        state, outcome = TrialState.FAIL, "invalid_config"
    elif isinstance(result, (int, float)):
        value = float(result)
        reports = dict.fromkeys((3, 4, 5), value)
    else:
        state, outcome = TrialState.PRUNED, "pruned"
        reports = dict(enumerate(map(float, result), start=3))
    return create_trial(
        state=state,
        value=value,
        params=params,
        distributions={name: SPACE[name] for name in params},
        intermediate_values=reports,
        user_attrs={attributes.OUTCOME: outcome},
    )


def study(pruner: BasePruner, trials: Sequence[FrozenTrial], direction: str = "maximize") -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    made = optuna.create_study(
        pruner=pruner, direction=StudyDirection[direction.upper()], sampler=optuna.samplers.RandomSampler()
    )
    for item in trials:
        made.add_trial(item)
    return made


def start(where: optuna.Study, size: int, /, **knobs: Any) -> Trial:
    """A trial of a sampler's making, all parameters suggested, nothing reported."""
    params: Mapping[str, Any] = {"zero_stage": 1, **knobs, MICRO_BATCH: size}
    item = where.ask()
    for name, value in params.items():
        internal = SPACE[name].to_internal_repr(value)
        where._storage.set_trial_param(item._trial_id, name, internal, SPACE[name])
    return Trial(where, item._trial_id)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    return SimpleNamespace(trial=trial, study=study, start=start, OOM=OOM, BROKEN=BROKEN)
