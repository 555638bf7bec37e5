"""State lives in the study alone: restarts, lost trials, other workers, and trials that are not the sampler's own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import optuna
import pytest
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState

from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, LineageRandomSampler
from optuna_dsat.trials import attributes
from optuna_dsat.trials.attributes import VETOED
from optuna_dsat.trials.lineage import MICRO_BATCH, group

Method = tuple[Callable[..., BaseSampler], Callable[[], BasePruner]]
METHODS: dict[str, Method] = {
    "binary": (BinarySearchSampler, NopPruner),
    "random": (LineageRandomSampler, DeepSpeedPruner),
    "asha": (BinarySearchSampler, AshaPruner),
}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def create(kit: SimpleNamespace, method: Method, seed: int | None = 5, **kwargs: Any) -> optuna.Study:
    sampler, pruner = method
    study: optuna.Study = kit.create(sampler(seed=seed), pruner(), **kwargs)
    return study


@methods
def test_four_in_flight_work_on_four_lineages_without_duplicates(kit: SimpleNamespace, method: Method) -> None:
    study = create(kit, method)
    driver = kit.Driver(study)
    flying: deque[Any] = deque()
    for _ in range(40):
        flying.append(driver.ask())
        if len(flying) == 4:
            assert len(group(kit.in_flight(study))) == 4
            driver.answer(*flying.popleft())
    while flying:
        driver.answer(*flying.popleft())
    assert len(set(kit.sequence(study))) == len(study.trials)
    assert kit.launched(study) >= 37


@methods
def test_trials_asked_but_not_yet_suggested_are_known_to_others(kit: SimpleNamespace, method: Method) -> None:
    study = create(kit, method)
    driver = kit.Driver(study)
    waves = [driver.ask() for _ in range(4)]
    for wave in waves:
        driver.answer(*wave)
    trials = [study.ask() for _ in range(4)]
    assert len({str(sorted(kit.suggest(t).items())) for t in trials}) == 4
    assert len(group(kit.in_flight(study))) == 4


@methods
def test_an_enqueued_trial_runs_first_and_informs_later_ones(kit: SimpleNamespace, method: Method) -> None:
    study = create(kit, method)
    own = {"zero_stage": 2, "offload_optimizer": "none", "reduce_bucket_size": int(5e7), MICRO_BATCH: 16}
    study.enqueue_trial(own)
    driver = kit.Driver(study)
    driver.run(1)
    assert study.trials[0].params == own
    driver.run(1)
    assert study.trials[1].params == {**own, MICRO_BATCH: study.trials[1].params[MICRO_BATCH]}
    assert study.trials[1].params[MICRO_BATCH] > 16


@methods
def test_a_partly_fixed_trial_keeps_what_is_fixed(kit: SimpleNamespace, method: Method) -> None:
    study = create(kit, method)
    driver = kit.Driver(study)
    driver.run(3)
    study.enqueue_trial({"zero_stage": 3, "offload_param": "cpu"})
    driver.run(1)
    assert study.trials[3].params["zero_stage"] == 3
    assert study.trials[3].params["offload_param"] == "cpu"
    driver.run(20)
    assert len(set(kit.sequence(study))) == 24


@methods
def test_foreign_trials_neither_break_nor_trap_a_search(kit: SimpleNamespace, method: Method) -> None:
    study = create(kit, method)
    space = {
        "zero_stage": optuna.distributions.CategoricalDistribution([1, 2, 3]),
        "lr": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True),
        MICRO_BATCH: optuna.distributions.IntDistribution(1, 64, log=True),
    }
    for params in ({"lr": 1e-3}, {"zero_stage": 1, "lr": 1e-2, MICRO_BATCH: 8}, {"zero_stage": 2}):
        study.add_trial(optuna.create_trial(params=params, distributions={k: space[k] for k in params}, value=1.0))
    study.add_trial(optuna.create_trial(state=TrialState.FAIL))
    kit.Driver(study, suggest=partial(kit.suggest, wide=False)).run(30)
    fits = {o.params["zero_stage"]: o.largest_fit for o in group(study.trials[4:]).values()}
    assert set(fits) == {1, 2, 3}
    assert (fits[3] or 0) >= 32


@methods
def test_failures_vetoes_and_nan_do_not_end_or_distort_a_lineage(kit: SimpleNamespace, method: Method) -> None:
    study = create(kit, method)
    driver = kit.Driver(study, suggest=partial(kit.suggest, stages=(2,), wide=False))
    for number in range(5):
        trial, _ = driver.ask()
        if number == 0:
            study.tell(trial, state=TrialState.FAIL)
        elif number == 1:
            trial.set_user_attr(VETOED, "duplicate")
            study.tell(trial, state=TrialState.PRUNED)
        elif number == 2:
            trial.set_user_attr(attributes.OUTCOME, "communication_error")
            study.tell(trial, state=TrialState.FAIL)
        elif number == 3:
            with pytest.warns(UserWarning, match="nan is not acceptable"):
                study.tell(trial, math.nan)
        else:
            trial.set_user_attr(attributes.OUTCOME, "timeout")
            study.tell(trial, state=TrialState.FAIL)
    assert len(set(kit.sequence(study))) == 5
    (lineage,) = group(study.trials).values()
    assert lineage.conclusive == ()
    driver.run(5)
    (lineage,) = group(study.trials).values()
    assert lineage.largest_fit is not None
    assert 15 <= lineage.largest_fit <= 21


@methods
def test_knobs_of_a_planned_trial_are_suggested_without_reading_the_history(
    kit: SimpleNamespace, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = create(kit, method)
    driver = kit.Driver(study)
    driver.run(1)
    trial = study.ask()
    reads = MagicMock(wraps=study.get_trials)
    monkeypatch.setattr(study, "get_trials", reads)
    assert kit.suggest(trial)["zero_stage"] == study.trials[0].params["zero_stage"]
    assert reads.call_count == 1  # the line above


def unbroken(kit: SimpleNamespace, method: Method, n: int) -> optuna.Study:
    study = create(kit, method)
    kit.Driver(study).run(n)
    return study


@methods
def test_restarting_after_every_trial_changes_nothing(kit: SimpleNamespace, method: Method, tmp_path: Path) -> None:
    for _ in range(2):
        storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db")
        for _ in range(4):
            study = create(kit, method, storage=storage)
            kit.Driver(study).run(1)
        storage.remove_session()
        storage.engine.dispose()
    assert kit.sequence(study) == kit.sequence(unbroken(kit, method, 8))


@methods
@pytest.mark.filterwarnings("ignore:RetryHeartbeatStaleTrialCallback is experimental")
@pytest.mark.parametrize(("at", "suggested"), [(0, False), (9, True)])
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
    study.sampler, study.pruner = sampler(seed=5), pruner()
    driver = kit.Driver(study)
    driver.claims.discard(tuple(sorted(study.trials[at].params.items())))  # a lost trial gives its claim back
    driver.run(18 - at)
    sequence = kit.sequence(study)
    del sequence[at]
    assert sequence == kit.sequence(unbroken(kit, method, 18))


@methods
def test_without_a_seed_workers_share_the_one_of_the_study(kit: SimpleNamespace, method: Method) -> None:
    study = create(kit, method, seed=None)
    kit.Driver(study).run(2)
    seed = study._storage.get_study_system_attrs(study._study_id)["dsat:sampler_seed"]
    study.sampler = method[0]()
    kit.Driver(study).run(10)
    assert study._storage.get_study_system_attrs(study._study_id)["dsat:sampler_seed"] == seed
    again = create(kit, method, seed=seed)
    kit.Driver(again).run(12)
    assert kit.sequence(again) == kit.sequence(study)


@methods
@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_both_directions_find_the_best_of_a_small_space(kit: SimpleNamespace, method: Method, direction: str) -> None:
    study = create(kit, method, seed=1, direction=direction)

    def cost(knobs: dict[str, Any]) -> float:
        value: float = kit.rate(knobs)
        return value if direction == "maximize" else 1000.0 / value

    kit.Driver(study, suggest=partial(kit.suggest, wide=False), metric=cost).run(30)
    best = study.best_trial.params
    # stage 3 fits 33 samples, more than the others: 33 / (1.6 + 3.3) beats 21 / (1.1 + 2.1)
    assert best["zero_stage"] == 3
    assert best["train_micro_batch_size_per_gpu"] >= 32
