"""What failed launches teach of structures."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.trial_config import PartitionedModelError
from optuna_dsat.trials import attributes
from optuna_dsat.trials.failures import structure_failures
from optuna_dsat.trials.lineage import MICRO_BATCH, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO_STAGE

ERROR = "rank 1: TypeError: DeepSpeedZeroOptimizer is not an Optimizer"
DISTRIBUTIONS = {
    ZERO_STAGE: CategoricalDistribution([0, 1, 2, 3]),
    OFFLOAD_OPTIMIZER: CategoricalDistribution(["none", "cpu"]),
    OFFLOAD_PARAM: CategoricalDistribution(["none", "cpu"]),
    MICRO_BATCH: IntDistribution(1, 64),
}


def launch(stage: int, error: str = "", *, size: int = 4, stalled: bool = False, **offloads: str) -> FrozenTrial:
    params: dict[str, Any] = {ZERO_STAGE: stage, **offloads, MICRO_BATCH: size}
    outcome = Outcome.STALLED if stalled else Outcome.SCRIPT_ERROR if error else Outcome.MEASURED
    return create_trial(
        params=params,
        distributions={name: DISTRIBUTIONS[name] for name in params},
        state=TrialState.FAIL if error else TrialState.COMPLETE,
        value=None if error else 1.0,
        user_attrs={attributes.OUTCOME: outcome.value, attributes.MESSAGE: error},
    )


def stages(*trials: FrozenTrial) -> list[int]:
    """Return the stages that are avoided whatever the offload."""
    return [item[ZERO_STAGE] for item in structure_failures(trials).avoided if set(item) == {ZERO_STAGE}]


def test_one_error_at_two_stages_closes_those_above_too() -> None:
    assert stages(launch(0), launch(1, ERROR)) == []
    assert stages(launch(0), launch(1, ERROR), launch(2, ERROR)) == [1, 2, 3]
    assert stages(launch(0), launch(2, ERROR), launch(3, ERROR)) == [2, 3], "at a lower stage it may run"
    assert stages(launch(0), launch(2, ERROR), launch(2, ERROR, size=2)) == [2]


def test_the_error_of_another_class_of_optimizer_is_the_same() -> None:
    third = ERROR.replace("ZeroOptimizer", "ZeroOptimizer_Stage3").replace("rank 1", "rank 0")
    assert stages(launch(0), launch(1, ERROR), launch(3, third)) == [1, 2, 3]
    assert stages(launch(0), launch(1, ERROR), launch(3, "rank 0: ValueError: loss is nan")) == []


def test_a_model_built_for_zero_3_closes_all_stages_below() -> None:
    error = f"rank 0: {PartitionedModelError.__name__} in initialize: The script builds its model within zero.Init"
    assert stages(launch(3), launch(0, error)) == [0, 1, 2]
    assert stages(launch(3), launch(2), launch(0, error)) == []
    assert stages(launch(3), launch(1, ERROR), launch(2, ERROR)) == [], "at ZeRO 0 it may run"


@pytest.mark.parametrize(
    ("error", "ran", "failed", "closed"),
    [
        ("RuntimeError: Direct calls to tensor.backward() are not supported in this configuration.", 1, 0, [0]),
        ("AssertionError: no_sync context manager is incompatible with gradient partitioning", 1, 2, [2, 3]),
    ],
)
def test_one_error_of_deepspeed_that_names_its_stages_closes_them(
    error: str, ran: int, failed: int, closed: list[int]
) -> None:
    assert stages(launch(ran), launch(failed, f"rank 1: {error}")) == closed


def test_stages_that_ran_are_not_blamed() -> None:
    assert stages(launch(0), launch(1, ERROR), launch(2, ERROR), launch(1)) == []
    assert stages(launch(0), launch(2), launch(3, ERROR), launch(3, ERROR, size=2)) == [3]


def test_while_nothing_ran_a_structure_is_given_up_after_three_launches() -> None:
    """A search of a script that fails anywhere went on until its budget was spent."""
    failed = [launch(1, ERROR), launch(2, ERROR), launch(1, "rank 0: ValueError: 3"), launch(2, ERROR)]
    assert list(structure_failures(failed).avoided) == []
    given_up = structure_failures([*failed, launch(1, ERROR)]).avoided
    assert given_up == [{ZERO_STAGE: 1, OFFLOAD_OPTIMIZER: "none"}], "with an offload it may run"


def test_an_offload_is_blamed_for_what_fails_with_it() -> None:
    trials = [
        launch(1),
        launch(2),
        launch(1, ERROR, offload_optimizer="cpu"),
        launch(2, ERROR, offload_optimizer="cpu"),
    ]
    assert structure_failures(trials).avoided == [
        {ZERO_STAGE: stage, OFFLOAD_OPTIMIZER: "cpu"} for stage in (0, 1, 2, 3)
    ]


def test_one_stall_closes_its_structure() -> None:
    assert stages(launch(0), launch(3, "no rank has moved for 31 s", stalled=True)) == [3]


def test_a_larger_size_than_ran_may_be_the_cause() -> None:
    result = structure_failures([launch(0), launch(1, ERROR, size=8), launch(2, ERROR, size=8)])
    assert result.avoided == []
    assert result.largest_first({ZERO_STAGE: 2}) == 4, "the next launch there tells size and structure apart"
    assert result.largest_first({ZERO_STAGE: 0}) is None
    assert stages(launch(0), launch(1, ERROR, size=8), launch(2, ERROR)) == [1, 2, 3]


@pytest.mark.parametrize("stage", [0, "auto"])
def test_the_users_own_config_outside_the_space_counts(stage: int | str) -> None:
    config = {MICRO_BATCH: 4, "zero_optimization": {"stage": stage}}
    own = create_trial(value=1.0, user_attrs={attributes.OUTCOME: "measured", attributes.CONFIG: config})
    assert stages(own, launch(1, ERROR), launch(2, ERROR)) == [1, 2, 3]
