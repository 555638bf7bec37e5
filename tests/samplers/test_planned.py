"""The classic methods draw lineages and limit micro-batches by the posterior of a planner."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.pruners import BasePruner, NopPruner
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState, create_trial

from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.problem import REACH
from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, LineageRandomSampler
from optuna_dsat.trials.attributes import DATA_LIMIT, OUTCOME
from optuna_dsat.trials.lineage import MICRO_BATCH, group
from tests.harness.small_model import GIB, HARDWARE, Machine, small_planner, small_problem, small_space

METHODS: dict[str, tuple[Callable[..., LineageRandomSampler | BinarySearchSampler], Callable[[], BasePruner]]] = {
    "random": (LineageRandomSampler, DeepSpeedPruner),
    "binary": (BinarySearchSampler, NopPruner),
    "asha": (BinarySearchSampler, AshaPruner),
}
methods = pytest.mark.parametrize("method", METHODS)
samplers = pytest.mark.parametrize("method", ["random", "binary"])
BASELINE = {**small_space().completed({"zero_stage": 2}), MICRO_BATCH: 1}


def study_of(kit: SimpleNamespace, method: str, planner: GuidedPlanner | None = None) -> optuna.Study:
    sampler, pruner = METHODS[method]
    study: optuna.Study = kit.create(sampler(planner=planner or small_planner(), seed=2), pruner())
    study.enqueue_trial(BASELINE)
    return study


@cache
def searched(method: str) -> optuna.Study:
    sampler, pruner = METHODS[method]
    study = optuna.create_study(direction="maximize", sampler=sampler(planner=small_planner(), seed=2), pruner=pruner())
    study.enqueue_trial(BASELINE)
    Machine().run(study, 18)
    return study


@methods
def test_a_search_ends_near_the_best_and_opens_no_lineage_twice(method: str) -> None:
    study = searched(method)
    assert study.best_value > 0.95 * Machine().best(small_planner())
    opened = group(study.trials)
    assert len(opened) > 4
    assert all(len(lineage.used) == len(lineage.trials) for lineage in opened.values())


@samplers
def test_a_resumed_search_goes_on_as_if_never_stopped(kit: SimpleNamespace, method: str, tmp_path: Path) -> None:
    sampler, pruner = METHODS[method]
    machine = Machine()
    for _ in range(6):
        storage = f"sqlite:///{tmp_path}/study.db"
        study = kit.create(sampler(planner=small_planner(), seed=2), pruner(), storage=storage)
        if not study.trials:
            study.enqueue_trial(BASELINE)
        machine.run(study, 1)
        study._storage.remove_session()
        study._storage._backend.engine.dispose()
    assert kit.sequence(study) == kit.sequence(searched(method))[:6]


@samplers
@pytest.mark.filterwarnings("ignore:RetryHeartbeatStaleTrialCallback is experimental")
def test_a_lost_trial_is_repeated(kit: SimpleNamespace, method: str) -> None:
    study, machine = study_of(kit, method), Machine()
    machine.run(study, 5)
    lost = study.ask()
    machine.space.suggest(lost)
    study.tell(lost, state=TrialState.FAIL)
    RetryHeartbeatStaleTrialCallback()(study, study.trials[5])
    machine.run(study, 5)
    sequence = kit.sequence(study)
    del sequence[5]
    assert sequence == kit.sequence(searched(method))[:10]


@samplers
def test_running_launches_are_of_different_lineages(kit: SimpleNamespace, method: str) -> None:
    study, machine = study_of(kit, method), Machine()
    machine.run(study, 2)
    for _ in range(4):
        machine.space.suggest(study.ask())
    assert len(group(study.trials[2:])) == 4


@methods
def test_no_launch_goes_beyond_the_reach_of_what_ran(method: str) -> None:
    largest = 1
    for trial in searched(method).trials:
        assert trial.params[MICRO_BATCH] <= REACH * largest
        largest = max(largest, trial.params[MICRO_BATCH] if trial.state == TrialState.COMPLETE else 0)
    assert largest > REACH


@samplers
def test_before_a_measurement_what_probably_runs_is_opened(kit: SimpleNamespace, method: str) -> None:
    hardware = replace(HARDWARE, device_memory_bytes=6 * GIB)
    planner = GuidedPlanner(small_problem(hardware=hardware))
    study = study_of(kit, method, planner)
    Machine(device_gib=5.0).run(study, 8)
    assert study.trials[0].user_attrs[OUTCOME] == "out_of_memory"
    assert "measured" in [trial.user_attrs[OUTCOME] for trial in study.trials]


def test_a_planner_draws_what_is_left_and_hopeless_structures_last() -> None:
    planner, trials = small_planner(), searched("binary").trials
    hopeless = [{"zero_stage": stage} for stage in (1, 2)]
    drawn = [planner.draw(trials, random.Random(seed), hopeless=hopeless) for seed in range(6)]
    assert {item[0]["zero_stage"] for item in drawn if item is not None} == {3}
    assert len({repr(item) for item in drawn}) > 1
    hopeless += [{"zero_stage": 3}]
    assert planner.draw(trials, random.Random(0), hopeless=hopeless) is not None
    opened = [{**params, MICRO_BATCH: 1} for params in planner.problem.table.lineages]
    single: list[dict[str, BaseDistribution]] = [
        {name: CategoricalDistribution([value]) for name, value in params.items()} for params in opened
    ]
    every = [
        create_trial(value=1.0, params=params, distributions=choices)
        for params, choices in zip(opened, single, strict=True)
    ]
    assert planner.draw(every, random.Random(0)) is None


def test_the_size_of_the_data_bounds_every_lineage() -> None:
    planner, trials = small_planner(), searched("binary").trials
    free = [planner.largest_fit(trials, params) for params in planner.problem.table.lineages]
    short = create_trial(state=TrialState.FAIL, user_attrs={DATA_LIMIT: 5})
    bounded = [planner.largest_fit([*trials, short], params) for params in planner.problem.table.lineages]
    assert max(size for size in free if size is not None) > 5
    assert max(size for size in bounded if size is not None) == 5
    assert planner.largest_fit(trials, {"lr": 0.1}) is planner.largest_worth(trials, {"lr": 0.1}) is None
