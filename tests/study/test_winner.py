"""Which configuration is handed over: the luckiest measurement is not always the best; search and rounds together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import optuna
import pytest
from optuna.pruners import NopPruner
from optuna.trial import FrozenTrial

from optuna_dsat.config.conditions import NVME, ZERO_STAGE
from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.outcome import Outcome
from optuna_dsat.samplers import BinarySearchSampler
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.search.methods import Method
from optuna_dsat.study.space import space_of
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedResult
from tests.harness.small_model import Machine, small_planner, small_space
from tests.harness.studies import StudyBench


def trial(number: int, value: float) -> FrozenTrial:
    result = optuna.trial.create_trial(value=value)
    result.number = number
    return result


def test_trials_are_ranked_by_belief_where_there_is_one() -> None:
    trials = [trial(0, 110.0), trial(1, 99.0), trial(2, 98.0)]
    plain = Method(sampler=BinarySearchSampler(), pruner=NopPruner(), planner=small_planner())
    assert [item.number for item in plain.ranked(trials, maximize=True)] == [0, 1, 2]
    posterior = SimpleNamespace(posterior_means=lambda _: {0: 97.0, 1: 99.0, 2: 98.0})
    wise = replace(plain, posterior=cast(GuidedPlanner, posterior))
    assert [item.number for item in wise.ranked(trials, maximize=True)] == [1, 2, 0]
    assert [item.number for item in wise.ranked(trials, maximize=False)] == [0, 2, 1]


def test_a_lucky_measurement_is_believed_less_than_it_shows() -> None:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    machine, base = Machine(), small_space().completed({"zero_stage": 2, "overlap_comm": True})
    for size in (4, 8, 12, 16, 20, 24):
        study.enqueue_trial({**base, "train_micro_batch_size_per_gpu": size})
        machine.run(study, 1)
    honest = small_planner().posterior_means(study.trials)
    trials = study.get_trials()
    lucky = trials[3]
    assert lucky.values is not None
    true = lucky.values[0]
    lucky.values = [1.06 * true]
    result = small_planner().posterior_means(trials)
    assert honest[3] == pytest.approx(true, rel=0.01)
    assert true < result[3] < 1.045 * true


SEARCHED = JointEstimate(numbers=(4, 7), means=(0.0, 0.02), covariance=((1e-4, 0.0), (0.0, 1e-4)))


def test_both_count_by_how_sure_they_are() -> None:
    rounds = {4: {1: 1.0, 2: 1.0}, 7: {1: math.exp(0.005), 2: math.exp(0.005)}}
    log_ratio, sd = SEARCHED.given(rounds, noise=0.01, maximize=True).log_ratio(7, 4)
    # A difference of 0.02 with variance 2e-4 by the search, of 0.005 with variance 1e-4 by two rounds.
    assert log_ratio == pytest.approx((0.02 + 2 * 0.005) / 3)
    assert sd == pytest.approx(math.sqrt(1 / (1 / 2e-4 + 1 / 1e-4)))


def test_what_a_round_has_in_common_teaches_nothing() -> None:
    calm = {4: {1: 1.0, 2: 1.1}, 7: {1: 1.02, 2: 1.07}}
    slower = {number: {1: result[1], 2: result[2] / 3} for number, result in calm.items()}
    given = [SEARCHED.given(item, noise=0.01, maximize=True) for item in (calm, slower)]
    np.testing.assert_allclose(given[0].means, given[1].means)
    alone = SEARCHED.given({4: {1: 5.0}, 7: {2: 1.0}, 9: {1: 1.0}}, noise=0.01, maximize=True)
    assert (alone.means, alone.covariance) == (SEARCHED.means, SEARCHED.covariance)


def test_a_trial_without_rounds_changes_nothing_between_the_others() -> None:
    rounds = {4: {1: 1.2, 2: 1.2}, 7: {1: 1.0, 2: 1.0}}
    third = JointEstimate(numbers=(4, 7, 9), means=(0.0, 0.02, 0.0), covariance=tuple(map(tuple, 1e-4 * np.eye(3))))
    given = [item.given(rounds, noise=0.001, maximize=True).log_ratio(4, 7) for item in (SEARCHED, third)]
    assert given[0] == pytest.approx(given[1])


def test_a_smaller_metric_is_better_where_it_is_minimised() -> None:
    rounds = {4: {1: 0.5}, 7: {1: 1.0}}
    assert SEARCHED.given(rounds, noise=0.001, maximize=False).log_ratio(4, 7)[0] > 0.6
    assert SEARCHED.given(rounds, noise=0.001, maximize=True).log_ratio(4, 7)[0] < -0.6


def test_trials_whose_errors_are_shared_are_told_apart_by_what_is_not() -> None:
    alike = JointEstimate(numbers=(1, 2), means=(0.0, 0.01), covariance=((0.0101, 0.01), (0.01, 0.0101)))
    assert list(alike.log_ratio(2, 1)) == pytest.approx([0.01, math.sqrt(2e-4)])


STRUCTURE = {"stage", "offload_optimizer", "offload_param"}


def _search(bench: StudyBench, hill: Hill) -> StudyResult:
    """Search with a budget of two launches: the user's config, and ZeRO 1 with two settings that no default has."""
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    space = space_of(bench.spec(), None)
    drawn = {**space.completed({"zero_stage": 1}), "reduce_scatter": False, "reduce_bucket_size": 10**6}
    bench.study().enqueue_trial({**drawn, "train_micro_batch_size_per_gpu": 8})
    return bench.run(bench.spec(max_trials=2, confirm=1), hill)


def _simplifying(bench: StudyBench) -> list[FrozenTrial]:
    return [trial for trial in bench.study().get_trials() if attributes.SIMPLIFIES in trial.user_attrs]


@pytest.mark.parametrize(("gain", "is_kept"), [(0.001, False), (-0.1, False), (0.2, True)])
def test_only_settings_with_an_effect_are_exported(bench: StudyBench, gain: float, is_kept: bool) -> None:
    def run(config: Mapping[str, Any]) -> SimulatedResult:
        is_plain = config["zero_optimization"].get("reduce_scatter") is not False
        seconds = 0.3 + 0.01 * config["train_micro_batch_size_per_gpu"]
        return SimulatedResult(startup_s=1, forward_s=seconds * (1 + gain if is_plain else 1))

    result = _search(bench, Hill(override=run))
    [simpler] = _simplifying(bench)
    assert (simpler.number, simpler.user_attrs[attributes.SIMPLIFIES]) == (2, 1)
    assert result.trial == (1 if is_kept else 2)
    assert ("reduce_bucket_size" in result.config["zero_optimization"]) is is_kept
    rounds = {contender.number for contender in result.verdict.contenders if contender.rounds}
    assert rounds == {0, result.trial}
    assert read_stored(bench.store, "s").launches_used == 2


def test_a_simpler_configuration_that_fails_changes_nothing(bench: StudyBench) -> None:
    def run(_: Mapping[str, Any]) -> SimulatedResult | None:
        failed = SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1)
        last = bench.study().get_trials()[-1]
        return failed if attributes.SIMPLIFIES in last.user_attrs and not last.state.is_finished() else None

    result = _search(bench, Hill(override=run))
    assert [trial.user_attrs[attributes.OUTCOME] for trial in _simplifying(bench)] == [Outcome.SCRIPT_ERROR]
    assert result.trial == 1


def test_no_launch_simplifies_a_result_that_is_not_confirmed_or_plain(bench: StudyBench) -> None:
    bench.run(bench.spec(max_trials=4, confirm=0), Hill())
    assert not _simplifying(bench)
    study = bench.spec(
        name="plain",
        max_trials=8,
        confirm=1,
        no_tune=tuple(knob.name for knob in KNOBS if knob.name not in (*STRUCTURE, ZERO_STAGE, NVME)),
    )
    assert bench.run(study, Hill()) is not None
    assert not any(attributes.SIMPLIFIES in trial.user_attrs for trial in bench.study("plain").get_trials())
