"""What is kept of a history between decisions changes none of them: a fresh process decides the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, LineageRandomSampler
from optuna_dsat.trials import lineage_cache
from optuna_dsat.trials.attributes import OUTCOME, VETOED
from optuna_dsat.trials.lineage import MICRO_BATCH, RETRY_ATTR

Knobs = dict[str, Any]
Method = tuple[Callable[[], BaseSampler], Callable[[], BasePruner]]


def ceiling(params: Any, trials: Any) -> int:
    measured = sum(t.state == TrialState.COMPLETE for t in trials)
    return int({1: 8, 2: 20, 3: 30}[params["zero_stage"]] + measured // 7 % 5)


METHODS: dict[str, Method] = {
    "binary": (lambda: BinarySearchSampler(seed=3, max_micro_batch=ceiling), NopPruner),
    "random": (lambda: LineageRandomSampler(max_micro_batch=ceiling), DeepSpeedPruner),
    "asha": (lambda: BinarySearchSampler(seed=3), lambda: AshaPruner(min_binary_search_trials=2)),
}
FOREIGN = {
    "zero_stage": CategoricalDistribution([1, 2, 3]),
    "lr": FloatDistribution(1e-5, 1e-1, log=True),
    MICRO_BATCH: IntDistribution(1, 64, log=True),
}


methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


class Company:
    """Workers on one study, and all that may happen to its trials, in an order that a seed decides."""

    def __init__(self, kit: SimpleNamespace, studies: list[optuna.Study], *, cold: bool) -> None:
        self.kit = kit
        self.studies = studies
        self.cold = cold
        self.chance = random.Random(11)
        self.flying: list[tuple[optuna.Study, Trial]] = []
        self.decisions: list[tuple[object, ...]] = []

    def decide(self, *what: object) -> None:
        self.decisions.append(what)

    def fresh(self) -> None:
        if self.cold:
            lineage_cache._LOCAL.__dict__.clear()

    def step(self) -> None:
        chance = self.chance
        study = chance.choice(self.studies)
        what = chance.random()
        if what < 0.06:
            self.add_foreign(study)
        elif what < 0.09:
            study.enqueue_trial({"zero_stage": 3, "offload_param": "cpu"})
        elif what < 0.12:
            own = {"zero_stage": 1, "offload_optimizer": "none", "reduce_bucket_size": int(5e6)}
            study.enqueue_trial({**own, MICRO_BATCH: chance.randint(1, 30)})
        elif what < 0.5 and len(self.flying) < 5:
            self.fresh()
            trial = study.ask()
            self.flying.append((study, trial))
            if chance.random() < 0.7:
                self.suggest(trial)
        elif self.flying:
            self.end(*self.flying.pop(chance.randrange(len(self.flying))))
        self.ask_for_the_end(study)

    def add_foreign(self, study: optuna.Study) -> None:
        params: Knobs = {"lr": 0.01}
        if self.chance.random() < 0.5:
            params |= {"zero_stage": self.chance.choice([1, 2]), MICRO_BATCH: self.chance.randint(1, 40)}
        space = {name: FOREIGN[name] for name in params}
        study.add_trial(create_trial(params=params, distributions=space, value=self.chance.random() * 300))
        study.add_trial(create_trial(state=TrialState.FAIL))

    def suggest(self, trial: Trial) -> Knobs:
        self.fresh()
        knobs: Knobs = self.kit.suggest(trial)
        self.decide("suggested", trial.number, tuple(knobs.items()))
        return knobs

    def end(self, study: optuna.Study, trial: Trial) -> None:
        knobs = self.suggest(trial)
        reason = self.ask_pruner(study, trial)
        what = self.chance.random()
        if reason and what < 0.9:
            trial.set_user_attr(VETOED, reason)
            study.tell(trial, state=TrialState.PRUNED)
        elif what < 0.05:
            self.lose(study, trial)
        elif what < 0.1:
            trial.set_user_attr(OUTCOME, self.chance.choice(["invalid_config", "stalled"]))
            study.tell(trial, state=TrialState.FAIL)
        elif knobs[MICRO_BATCH] > self.kit.edge(knobs):
            trial.set_user_attr(OUTCOME, "out_of_memory")
            study.tell(trial, state=TrialState.PRUNED)
        else:
            self.measure(study, trial, self.kit.rate(knobs) * self.chance.uniform(0.7, 1.0))

    def lose(self, study: optuna.Study, trial: Trial) -> None:
        study.tell(trial, state=TrialState.FAIL)
        lost: FrozenTrial = study.get_trials()[trial.number]
        study.add_trial(
            create_trial(
                state=TrialState.WAITING,
                params=lost.params,
                distributions=lost.distributions,
                system_attrs={**lost.system_attrs, RETRY_ATTR: lost.number},
            )
        )

    def measure(self, study: optuna.Study, trial: Trial, value: float) -> None:
        for step in range(3, 7):
            trial.report(value * self.chance.uniform(0.98, 1.02), step)
            self.fresh()
            stopped = trial.should_prune()
            self.decide("stopped", trial.number, step, stopped)
            if stopped:
                trial.set_user_attr(OUTCOME, "pruned")
                study.tell(trial, state=TrialState.PRUNED)
                return
        study.tell(trial, value)

    def ask_pruner(self, study: optuna.Study, trial: Trial) -> str | None:
        self.fresh()
        pruner: Any = study.pruner
        if isinstance(pruner, NopPruner):
            return None
        reason: str | None = pruner.reason(study, study._storage.get_trial(trial._trial_id))
        self.decide("reason", trial.number, reason)
        return reason

    def ask_for_the_end(self, study: optuna.Study) -> None:
        self.fresh()
        sampler: Any = study.sampler
        self.decide("exhausted", sampler.exhausted(study), sampler.exhausted(study, 20))


def decisions(
    kit: SimpleNamespace, method: Method, storages: list[BaseStorage], *, steps: int, cold: bool
) -> list[tuple[object, ...]]:
    """What workers decide, each with its own storage object and so with its own view of the study."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler, pruner = method
    study = optuna.create_study(storage=storages[0], study_name="s", direction="maximize")
    study._storage.set_study_system_attr(study._study_id, "dsat:sampler_seed", 3)
    workers = [
        optuna.load_study(study_name="s", storage=storage, sampler=sampler(), pruner=pruner()) for storage in storages
    ]
    company = Company(kit, workers, cold=cold)
    for _ in range(steps):
        company.step()
    return company.decisions


@methods
def test_decisions_over_a_long_history_are_those_of_a_fresh_process(kit: SimpleNamespace, method: Method) -> None:
    warm = decisions(kit, method, [InMemoryStorage()] * 2, steps=300, cold=False)
    cold = decisions(kit, method, [InMemoryStorage()] * 2, steps=300, cold=True)
    assert warm == cold
    assert {what[0] for what in warm} >= {"suggested", "exhausted", "stopped"}
    assert sum(what[0] == "suggested" for what in warm) > 120


@methods
def test_workers_that_share_a_database_decide_as_fresh_processes(
    kit: SimpleNamespace, method: Method, tmp_path: Path
) -> None:
    found = []
    for cold in (False, True):
        backends = [RDBStorage(f"sqlite:///{tmp_path}/{cold}.db") for _ in range(2)]
        storages: list[BaseStorage] = [optuna.storages.get_storage(backend) for backend in backends]
        found.append(decisions(kit, method, storages, steps=40, cold=cold))
        for backend in backends:
            backend.remove_session()
            backend.engine.dispose()
    assert found[0] == found[1]


@methods
def test_knobs_of_a_planned_trial_are_suggested_without_reading_the_history(
    kit: SimpleNamespace, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, pruner = method
    study = kit.create(sampler(), pruner())
    driver = kit.Driver(study)
    driver.run(1)
    trial = study.ask()
    reads = MagicMock(wraps=study.get_trials)
    monkeypatch.setattr(study, "get_trials", reads)
    assert kit.suggest(trial)["zero_stage"] == study.trials[0].params["zero_stage"]
    assert reads.call_count == 1  # the line above


def test_knobs_of_a_new_lineage_are_drawn_from_one_reading(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = kit.create(LineageRandomSampler(seed=0), DeepSpeedPruner())
    trial = study.ask()
    reads = MagicMock(wraps=study.get_trials)
    monkeypatch.setattr(study, "get_trials", reads)
    kit.suggest(trial)
    assert reads.call_count == 2  # one for the knobs, one for the micro-batch
