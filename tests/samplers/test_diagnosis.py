"""What breaks launches, against the exact posterior, and as a search uses it."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from optuna.pruners import NopPruner
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.guided.diagnosis import Components, Diagnosis
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.problem import Problem
from optuna_dsat.outcome import Outcome
from optuna_dsat.samplers import GuidedSampler
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import STRUCTURE
from tests.harness.small_model import CONFIG, HARDWARE, KEPT, PROFILE, Machine, small_space

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
    planner = GuidedPlanner(Problem(profile=PROFILE, hardware=HARDWARE, config=CONFIG, space=space))
    study = kit.create(GuidedSampler(planner=planner, seed=1), NopPruner())
    Refusing(space=space, offload_s=0.1).run(study, 30)
    failed = [structure_of(trial) for trial in study.trials if trial.state == TrialState.FAIL]
    assert failed, "the user's own is one of them"
    assert max(failed.count(item) for item in failed) <= 4
    assert len(failed) <= 10
