"""Searches leave structures at which the script fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState

from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.problem import Problem
from optuna_dsat.outcome import Outcome
from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, GuidedSampler, LineageRandomSampler
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, ZERO_STAGE
from tests.harness.small_model import CONFIG, HARDWARE, KEPT, PROFILE, Machine

LAUNCHES = 16


def space_from(stage: int) -> Any:
    request = SpaceRequest(
        ds_config={**CONFIG, "zero_optimization": {"stage": 0}},
        zero_stages=tuple(range(stage, 4)),
        fix={},
        no_tune=KEPT,
        nvme_path=None,
        params=PROFILE.params,
        micro_batch_cap=64,
        device="cuda",
        ranks_per_node=2,
    )
    return build_space(request)


class Refusing(Machine):
    """A script that fails with one error from a ZeRO stage on."""

    def __init__(self, *, least: int, space: Any) -> None:
        super().__init__(space=space)
        self.least = least

    def answer(self, study: optuna.Study, trial: Trial) -> FrozenTrial:
        if trial.params[ZERO_STAGE] < self.least:
            return super().answer(study, trial)
        trial.set_user_attr(attributes.OUTCOME, Outcome.SCRIPT_ERROR.value)
        trial.set_user_attr(attributes.MESSAGE, "rank 0: TypeError: DeepSpeedZeroOptimizer is not an Optimizer")
        return study.tell(trial, state=TrialState.FAIL)


def method(name: str, space: Any) -> tuple[BaseSampler, BasePruner]:
    config = {**CONFIG, "zero_optimization": {"stage": 0}}
    planner = GuidedPlanner(Problem(profile=PROFILE, hardware=HARDWARE, config=config, space=space))
    if name == "guided":
        return GuidedSampler(planner=planner, seed=5), NopPruner()
    if name == "random":
        return LineageRandomSampler(planner=planner, seed=5), DeepSpeedPruner()
    sampler = BinarySearchSampler(planner=None if name == "binary, plain" else planner, seed=5)
    return sampler, AshaPruner() if name == "asha" else NopPruner()


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("name", ["binary", "random", "asha", "guided", "binary, plain"])
def test_few_launches_are_lost_to_stages_that_fail(kit: SimpleNamespace, name: str, least: int) -> None:
    space = space_from(0)
    study = kit.create(*method(name, space))
    study.enqueue_trial({ZERO_STAGE: 0, MICRO_BATCH: 2})
    machine = Refusing(least=least, space=space)
    while len(study.trials) < LAUNCHES and not study.sampler.exhausted(study, classes=space.classes()):
        machine.run(study, 1)
    failed = [trial for trial in study.trials if trial.state == TrialState.FAIL]
    assert len(failed) <= (5 if name == "guided" else 3)


def test_a_search_whose_stages_all_fail_is_over(kit: SimpleNamespace) -> None:
    space = space_from(1)
    study = kit.create(*method("random", space))
    config = {**CONFIG, MICRO_BATCH: 8, "zero_optimization": {"stage": 0}}
    own = {attributes.OUTCOME: Outcome.MEASURED.value, attributes.CONFIG: config}
    study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs=own))
    machine = Refusing(least=1, space=space)
    while not study.sampler.exhausted(study, classes=space.classes()):
        machine.run(study, 1)
        assert len(study.trials) < LAUNCHES
    assert 2 < len(study.trials) <= 5
