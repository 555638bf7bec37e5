"""What failures teach: their causes, the probability that a configuration runs, and searches that leave what fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState

from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.guided.candidates import Observations
from optuna_dsat.guided.diagnosis import Components, Diagnosis
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.problem import Problem
from optuna_dsat.guided.run_probability import RunProbability
from optuna_dsat.outcome import Outcome
from optuna_dsat.pruners import DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, GuidedSampler, LineageRandomSampler
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, STRUCTURE, ZERO_STAGE
from tests.harness.small_model import CONFIG, GIB, KEPT, PROFILE, Machine, small_problem, small_space

BY_CHANCE = 0.02
NONE = np.zeros((0, 2), dtype=np.int64)


def exact(failed: list[list[int]], ran: list[list[int]], asked: list[int], priors: list[float]) -> float:
    """Return the probability that none of the components asked for is faulty, by all sets of faulty ones."""
    total, sound = 0.0, 0.0
    for faulty in product((False, True), repeat=len(priors)):
        if any(faulty[item] for launch in ran for item in launch):
            continue
        weight = float(np.prod([prior if is_so else 1 - prior for prior, is_so in zip(priors, faulty, strict=True)]))
        for launch in failed:
            weight *= 1.0 if any(faulty[item] for item in launch) else BY_CHANCE
        total += weight
        sound += weight * (not any(faulty[item] for item in asked))
    return float(sound / total)


@pytest.mark.parametrize("seed", range(8))
def test_probabilities_are_those_of_all_sets_of_faults(seed: int) -> None:
    dice = np.random.default_rng(seed)
    priors = dice.uniform(0.005, 0.2, 7)
    failed, ran = (np.sort(dice.permuted(np.tile(np.arange(7), (n, 1)), axis=1)[:, :3]) for n in (4, 1))
    diagnosis = Diagnosis(failed, ran, priors=priors)
    suspected = np.setdiff1d(failed, ran).tolist()
    for item in suspected:
        alone = np.array([[item, -1, -1]])
        expected = exact(failed.tolist(), ran.tolist(), [item], priors.tolist())
        assert diagnosis.runs(alone)[0] == pytest.approx(expected, rel=1e-6)
        assert diagnosis.probability_of(item) == pytest.approx(1 - expected, rel=1e-6)
    assert diagnosis.runs(ran)[0] == pytest.approx(1.0), "what ran does so again"


def test_what_failures_have_in_common_is_the_suspect() -> None:
    priors = np.full(10, 0.01)
    once = Diagnosis(np.array([[0, 1]]), NONE, priors=priors)
    assert once.probability_of(0) == pytest.approx(once.probability_of(1))
    again = Diagnosis(np.array([[0, 1], [0, 2], [0, 3]]), NONE, priors=priors)
    assert again.probability_of(0) > 0.95
    assert again.probability_of(1) < 0.05
    cleared = Diagnosis(np.array([[0, 1], [0, 2], [0, 3]]), np.array([[0, 4]]), priors=priors)
    assert cleared.probability_of(0) == 0
    assert cleared.runs(np.array([[0, 5], [0, 1]])) == pytest.approx([1.0, 1 - cleared.probability_of(1)])


def test_components_are_numbered_apart() -> None:
    relatives, structure = np.array([[0, 0, 0], [0, 1, 0], [1, 0, 0]]), np.array([0, 1, 2])
    knobs = np.array([[0, 0], [1, 0], [1, 1]])
    known = [np.array([True, True]), np.array([False, True])]
    result = Components.of(np.array([0, 0, 1]), relatives, structure, knobs, has_value=known)
    columns = [set(column[column >= 0].tolist()) for column in result.numbers.T]
    assert sum(len(column) for column in columns) == len(set().union(*columns))
    assert max(set().union(*columns)) < len(result.priors) - 1, "the last one is of no row"
    assert result.numbers[:, 4].tolist()[1:] == [result.numbers[1, 4]] * 2, "a value is the same in two structures"
    assert result.numbers[1, 5] != result.numbers[2, 5], "and with each of them another"
    assert result.numbers[:2, 6].tolist() == [-1, -1], "a knob without a value is none"
    assert (result.numbers[:, -1] >= 0).tolist() == [False, False, True], "a stage is one of those from it on"


class Refusing(Machine):
    """Refuses some structures, whatever the rest."""

    refused = frozenset({(2, "none", "none"), (3, "none", "none"), (2, "cpu", "none"), (3, "cpu", "cpu")})

    def answer(self, study: optuna.Study, trial: optuna.Trial) -> FrozenTrial:
        if structure_of(trial) not in self.refused:
            return super().answer(study, trial)
        trial.set_user_attr(attributes.OUTCOME, Outcome.INVALID_CONFIG.value)
        return study.tell(trial, state=TrialState.FAIL)


def structure_of(trial: optuna.Trial | FrozenTrial) -> tuple[object, ...]:
    return tuple(trial.params.get(name, "none") for name in STRUCTURE)


def test_a_structure_that_is_refused_is_left_after_a_few_launches(kit: SimpleNamespace) -> None:
    space = small_space(no_tune=KEPT[2:])
    planner = GuidedPlanner(small_problem(space=space))
    study = kit.create(GuidedSampler(planner=planner, seed=1), NopPruner())
    Refusing(space=space, offload_s=0.1).run(study, 20)
    failed = [structure_of(trial) for trial in study.trials if trial.state == TrialState.FAIL]
    assert failed, "the user's own is one of them"
    assert max(failed.count(item) for item in failed) <= 4
    assert len(failed) <= 10


Launches = Sequence[tuple[int, int, bool]]
"""Row, micro-batch, and whether it fitted, of each."""


@pytest.fixture(scope="module")
def problem() -> Problem:
    space = small_space(no_tune=KEPT[1:])
    return GuidedPlanner(small_problem(space=space)).problem


def observed(launches: Launches) -> Observations:
    rows, sizes, fits = (np.array(column) for column in zip(*launches, strict=True))
    count, no = len(launches), np.zeros(len(launches), dtype=bool)
    unknown = np.full(count, np.nan)
    return Observations(
        number=np.arange(count),
        row=rows,
        micro_batch=sizes.astype(np.float64),
        accumulation=np.ones(count),
        value=unknown,
        peak=unknown,
        phases=np.full((4, count), np.nan),
        overhead=unknown,
        device_out_of_memory=~fits.astype(bool),
        host_out_of_memory=no,
        broken=no,
        fits=fits.astype(bool),
        pending=no,
        launch=np.arange(count),
        used={},
    )


def chances(problem: Problem, launches: Launches, asked: Sequence[tuple[int, int]]) -> list[float]:
    """Return the probabilities to fit of rows at micro-batches, by a posterior that is sure that all fit."""

    def predict(inputs: Any) -> tuple[Any, Any, Any]:
        count = len(inputs.lineage)
        return np.full(count, 1.0), np.full(count, 10.0 * GIB), np.full(count, 1.0 * GIB)

    memory: Any = SimpleNamespace(predict=predict, unexplained=np.inf)
    result = RunProbability(problem, observed(launches), memory)
    rows, sizes = (np.array(column) for column in zip(*asked, strict=True))
    return [float(fit) for fit in result.fits(rows, sizes)[1]]


def rows_of_a_structure(problem: Problem) -> list[int]:
    """Return lineages of one structure, those with the smallest buffers first."""
    table = problem.table
    rows = np.flatnonzero(table.structure == np.bincount(table.structure).argmax())
    return [int(row) for row in rows[np.argsort(table.buffers[rows].sum(axis=1), kind="stable")]]


def test_an_edge_that_is_far_from_where_it_was_thought_is_bisected(problem: Problem) -> None:
    """Ten launches in a row ran out of memory, each a sample or two smaller than the one before."""
    lean, *_, large, larger, largest, other = rows_of_a_structure(problem)
    failed = [(largest, 40, False), (larger, 37, False), (large, 34, False), (other, 32, False)]
    launches = [(lean, 1, True), *failed]
    near, below = chances(problem, launches, [(lean, 29), (lean, 5)])
    assert near <= 0.4
    assert below == pytest.approx(1.0, abs=1e-3)
    localised = [(lean, 28, True), *failed]
    assert chances(problem, localised, [(lean, 29)])[0] > 0.6


def test_more_samples_than_leaner_buffers_save_do_not_fit_either(problem: Problem) -> None:
    rows = rows_of_a_structure(problem)
    lean, fat = rows[0], rows[-1]
    saved = float(problem.table.buffers[fat].sum() - problem.table.buffers[lean].sum())
    samples = int(np.ceil(2 * saved / PROFILE.activation_bytes_per_sample))
    assert samples > 1
    launches = [(lean, 20, True), (fat, 20, False)]
    few, many = chances(problem, launches, [(lean, 20 + samples // 4), (lean, 20 + samples)])
    assert few > 0.9
    assert many <= 0.2


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


class FailingFrom(Machine):
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
    planner = GuidedPlanner(small_problem(config=config, space=space))
    if name == "guided":
        return GuidedSampler(planner=planner, seed=5), NopPruner()
    if name == "random":
        return LineageRandomSampler(planner=planner, seed=5), DeepSpeedPruner()
    return BinarySearchSampler(planner=None if name == "binary, plain" else planner, seed=5), NopPruner()


@pytest.mark.parametrize(
    ("name", "least"),
    [("binary", 1), ("random", 2), ("guided", 2), ("binary, plain", 2)],
)
def test_few_launches_are_lost_to_stages_that_fail(kit: SimpleNamespace, name: str, least: int) -> None:
    space = space_from(0)
    study = kit.create(*method(name, space))
    study.enqueue_trial({ZERO_STAGE: 0, MICRO_BATCH: 2})
    machine = FailingFrom(least=least, space=space)
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
    machine = FailingFrom(least=1, space=space)
    while not study.sampler.exhausted(study, classes=space.classes()):
        machine.run(study, 1)
        assert len(study.trials) < LAUNCHES
    assert 2 < len(study.trials) <= 5


class Capped(Machine):
    """It runs out of memory at more than seven samples, which take hardly any."""

    def fits(self, params: Mapping[str, Any]) -> bool:
        return bool(params[MICRO_BATCH] <= 7)

    def peak(self, params: Mapping[str, Any]) -> int:
        return super().peak({**params, MICRO_BATCH: 1})


def test_the_micro_batch_is_bisected_after_an_out_of_memory_that_no_memory_explains(kit: SimpleNamespace) -> None:
    planner = GuidedPlanner(small_problem(profile=replace(PROFILE, activation_bytes_per_sample=2**20)))
    study, machine = kit.create(GuidedSampler(planner=planner, seed=1), NopPruner()), Capped()
    study.enqueue_trial({**(machine.space.params_of(CONFIG) or {}), MICRO_BATCH: 1})
    machine.run(study, 16)
    outcomes = [trial.user_attrs[attributes.OUTCOME] for trial in study.trials]
    assert 1 <= outcomes.count(Outcome.OUT_OF_MEMORY) <= 4
    assert study.best_trial.params[MICRO_BATCH] >= 6
