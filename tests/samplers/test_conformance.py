"""Optuna's own contract for samplers; a study without a proper micro-batch is refused with its first trial."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import BasicSamplerTestCase, SingleOnlySamplerTestCase

from optuna_dsat.samplers import BinarySearchSampler, GuidedSampler, LineageRandomSampler
from optuna_dsat.samplers._base import LineageSampler
from optuna_dsat.trials.lineage import MICRO_BATCH
from tests.harness.small_model import small_planner


class Lenient(LineageSampler):
    """Draws also where there is no micro-batch: Optuna's cases have none, or a float."""

    def _refuse(self, why: str) -> None:
        del why


class Binary(Lenient, BinarySearchSampler):
    """Bisects."""


class Guided(Lenient, GuidedSampler):
    """Plans."""


class Random(Lenient, LineageRandomSampler):
    """Draws at random."""


class TestSamplers(BasicSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture(
        params=[
            partial(Binary, micro_batch="x", seed=3),
            partial(Guided, planner=small_planner(), seed=3),
            partial(Random, micro_batch="x", seed=3),
        ]
    )
    def sampler(self, request: pytest.FixtureRequest) -> Callable[[], BaseSampler]:
        factory: Callable[[], BaseSampler] = request.param
        return factory


SAMPLERS = [BinarySearchSampler, GuidedSampler, LineageRandomSampler]


def refused(sampler: BaseSampler, objective: Callable[[optuna.Trial], float]) -> tuple[str, int]:
    """Return why a study is refused, and after how many trials."""
    study = optuna.create_study(direction="maximize", sampler=sampler)
    with pytest.raises(ValueError, match="cannot search this study") as raised:
        study.optimize(objective, n_trials=5)
    return str(raised.value), len(study.trials)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("suggest", "reason"),
    [
        (
            lambda trial: trial.suggest_float("batch", 1, 64),
            "a float; it must be whole numbers: trial.suggest_int('batch'",
        ),
        (lambda trial: trial.suggest_categorical("batch", [1, 2, 2.5]), "one of 1, 2, 2.5; it must be whole numbers"),
    ],
    ids=["float", "choices"],
)
def test_what_is_not_whole_is_refused_as_it_is_suggested(
    sampler: Callable[..., BaseSampler], suggest: Callable[[optuna.Trial], float], reason: str
) -> None:
    why, count = refused(sampler(micro_batch="batch"), suggest)
    assert f"the micro-batch 'batch' is {reason}" in why
    assert count == 1


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_name_that_no_parameter_has_is_refused_after_the_first_trial(sampler: Callable[..., BaseSampler]) -> None:
    why, count = refused(sampler(), lambda trial: float(trial.suggest_int("batch_size", 1, 64)))
    assert f"trial 0 has no integer parameter {MICRO_BATCH!r}, only batch_size" in why
    assert "micro_batch='batch_size'" in why
    assert count == 1


def test_a_trial_that_is_pruned_before_its_micro_batch_is_no_reason() -> None:
    def objective(trial: optuna.Trial) -> float:
        if trial.suggest_categorical("flag", [False, True]):
            raise optuna.TrialPruned
        return float(trial.suggest_int("batch", 1, 8))

    study = optuna.create_study(direction="maximize", sampler=BinarySearchSampler(micro_batch="batch", seed=0))
    study.optimize(objective, n_trials=6)
    assert len(study.trials) == 6


@pytest.mark.parametrize("name", [None, 8, 8.0, ""])
def test_a_name_is_a_text(name: object) -> None:
    with pytest.raises(ValueError, match="micro_batch must name the micro-batch parameter"):
        BinarySearchSampler(micro_batch=name)  # type: ignore[arg-type]


def test_knobs_that_are_numbers_are_drawn_anew_for_each_trial_and_alike_with_a_seed() -> None:
    def drawn(seed: int) -> list[float]:
        study = optuna.create_study(sampler=BinarySearchSampler(micro_batch="batch", seed=seed))
        return [study.ask().suggest_float("lr", 1e-5, 1e-1, log=True) for _ in range(4)]

    assert len({*drawn(0)}) == 4
    assert drawn(0) == drawn(0) != drawn(1)
