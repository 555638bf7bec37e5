"""State lives in the study alone: kill, restart, retry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState

from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, LineageRandomSampler

Method = tuple[Callable[..., BaseSampler], Callable[[], BasePruner]]
METHODS: dict[str, Method] = {
    "binary": (BinarySearchSampler, NopPruner),
    "random": (LineageRandomSampler, DeepSpeedPruner),
    "asha": (BinarySearchSampler, AshaPruner),
}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def unbroken(kit: SimpleNamespace, method: Method, n: int, **kwargs: Any) -> optuna.Study:
    sampler, pruner = method
    study: optuna.Study = kit.create(sampler(seed=7), pruner(), **kwargs)
    kit.Driver(study).run(n)
    return study


@methods
def test_restarting_after_every_trial_changes_nothing(kit: SimpleNamespace, method: Method, tmp_path: Path) -> None:
    sampler, pruner = method
    for _ in range(12):
        study = kit.create(sampler(seed=7), pruner(), storage=f"sqlite:///{tmp_path}/study.db")
        kit.Driver(study).run(1)
        study._storage.remove_session()
        study._storage._backend.engine.dispose()
    assert kit.sequence(study) == kit.sequence(unbroken(kit, method, 12))


@methods
@pytest.mark.filterwarnings("ignore:RetryHeartbeatStaleTrialCallback is experimental")
@pytest.mark.parametrize("suggested", [True, False])
@pytest.mark.parametrize("at", [0, 9])
def test_a_lost_trial_is_repeated_and_the_search_goes_on_as_if_nothing_happened(
    kit: SimpleNamespace, method: Method, at: int, suggested: bool
) -> None:
    study = unbroken(kit, method, at)
    trial = study.ask()
    if suggested:
        kit.suggest(trial)
    study.tell(trial, state=TrialState.FAIL)
    RetryHeartbeatStaleTrialCallback()(study, study.trials[at])
    sampler, pruner = method
    study.sampler, study.pruner = sampler(seed=7), pruner()
    driver = kit.Driver(study)
    driver.claims.discard(tuple(sorted(study.trials[at].params.items())))  # a lost trial gives its claim back
    driver.run(25 - at)
    sequence = kit.sequence(study)
    del sequence[at]
    assert sequence == kit.sequence(unbroken(kit, method, 25))


@methods
def test_without_a_seed_workers_share_the_one_of_the_study(kit: SimpleNamespace, method: Method) -> None:
    sampler, pruner = method
    study = kit.create(sampler(), pruner())
    kit.Driver(study).run(2)
    seed = study._storage.get_study_system_attrs(study._study_id)["dsat:sampler_seed"]
    study.sampler = sampler()
    kit.Driver(study).run(10)
    assert study._storage.get_study_system_attrs(study._study_id)["dsat:sampler_seed"] == seed
    again = kit.create(sampler(seed=seed), pruner())
    kit.Driver(again).run(12)
    assert kit.sequence(again) == kit.sequence(study)


@methods
@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_both_directions_find_the_best_of_a_small_space(kit: SimpleNamespace, method: Method, direction: str) -> None:
    sampler, pruner = method
    study = kit.create(sampler(seed=1), pruner(), direction=direction)

    def cost(knobs: dict[str, Any]) -> float:
        value: float = kit.rate(knobs)
        return value if direction == "maximize" else 1000.0 / value

    kit.Driver(study, suggest=partial(kit.suggest, wide=False), metric=cost).run(30)
    best = study.best_trial.params
    # stage 3 fits 33 samples, more than the others: 33 / (1.6 + 3.3) beats 21 / (1.1 + 2.1)
    assert best["zero_stage"] == 3
    assert best["train_micro_batch_size_per_gpu"] >= 32
