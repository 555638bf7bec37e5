"""Other workers, and trials that are not the sampler's own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import optuna
import pytest
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
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


def create(kit: SimpleNamespace, method: Method) -> optuna.Study:
    sampler, pruner = method
    study: optuna.Study = kit.create(sampler(seed=5), pruner())
    return study


@methods
def test_four_in_flight_work_on_four_lineages_without_duplicates(kit: SimpleNamespace, method: Method) -> None:
    study = create(kit, method)
    driver = kit.Driver(study)
    flying: deque[Any] = deque()
    for _ in range(60):
        flying.append(driver.ask())
        if len(flying) == 4:
            assert len(group(kit.in_flight(study))) == 4
            driver.answer(*flying.popleft())
    while flying:
        driver.answer(*flying.popleft())
    assert len(set(kit.sequence(study))) == len(study.trials)
    assert kit.launched(study) >= 55


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
    sampler, pruner = method
    study = kit.create(sampler(seed=5), pruner())
    driver = kit.Driver(study)
    driver.run(1)
    trial = study.ask()
    reads = MagicMock(wraps=study.get_trials)
    monkeypatch.setattr(study, "get_trials", reads)
    assert kit.suggest(trial)["zero_stage"] == study.trials[0].params["zero_stage"]
    assert reads.call_count == 1  # the line above
