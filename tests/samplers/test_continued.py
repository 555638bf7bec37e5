"""Searches whose launches measure several trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.pruners import NopPruner
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from optuna_dsat.config import ds_config
from optuna_dsat.config.differences import live_changes
from optuna_dsat.guided.order import start_of_climb
from optuna_dsat.guided.posterior import Posterior
from optuna_dsat.guided.sizes import UnusedSizes
from optuna_dsat.outcome import Outcome
from optuna_dsat.samplers import GuidedSampler
from optuna_dsat.trials import attributes
from optuna_dsat.trials.attributes import waiting_launch
from optuna_dsat.trials.lineage import MICRO_BATCH
from tests.harness.small_model import CONFIG, Machine, small_planner, small_problem, small_space

START = datetime(2026, 11, 26)


def trial(
    number: int, *, outcome: Outcome | None = Outcome.MEASURED, root: str = "", began: float, ended: float | None
) -> FrozenTrial:
    """Return a trial that began and ended these seconds after ``START``; ``ended`` is None if it runs."""
    attrs: dict[str, Any] = {attributes.LAUNCH_ID: f"trial-{number:04d}"}
    if root:
        attrs[attributes.ROOT_LAUNCH] = root
    if ended is not None and outcome is not None:
        attrs[attributes.OUTCOME] = outcome.value
    done = {"state": TrialState.COMPLETE, "value": 1.0} if ended is not None else {"state": TrialState.RUNNING}
    result = create_trial(**done, user_attrs=attrs)
    result.number = number
    result.datetime_start = START + timedelta(seconds=began)
    result.datetime_complete = None if ended is None else START + timedelta(seconds=ended)
    return result


FIRST = trial(0, began=0, ended=10)
SECOND = trial(1, root="trial-0000", began=10, ended=20)


@pytest.mark.parametrize(
    ("trials", "waiting"),
    [
        ([], None),
        ([FIRST], None),
        ([FIRST, SECOND], "trial-0000"),
        ([FIRST, SECOND, trial(2, began=20, ended=30)], "trial-0002"),
        ([FIRST, SECOND, trial(2, outcome=Outcome.OUT_OF_MEMORY, began=20, ended=30)], None),
        ([FIRST, SECOND, trial(2, began=15, ended=None)], "trial-0000"),
        ([FIRST, SECOND, trial(2, began=20, ended=None)], None),
    ],
)
def test_the_latest_launch_waits_if_it_was_measured_and_launches_continue(
    trials: list[FrozenTrial], waiting: str | None
) -> None:
    assert waiting_launch(trials) == waiting


def test_rows_of_one_engine_differ_in_live_settings_only() -> None:
    space, table = small_space(), small_planner().problem.table
    configs = [ds_config.merge(CONFIG, space.overlay({**params, MICRO_BATCH: 1})) for params in table.lineages]
    pairs = np.random.default_rng(0).integers(len(configs), size=(2000, 2))
    pairs = np.concatenate([pairs, np.column_stack([np.arange(len(configs) - 1), np.arange(1, len(configs))])])
    for a, b in pairs.tolist():
        assert (table.engine[a] == table.engine[b]) == (live_changes(configs[a], configs[b]) is not None)


class Continuing(Machine):
    """A machine whose launches continue, so that a trial of the same engine starts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.root = ""
        self.config: dict[str, Any] = {}

    def answer(self, study: optuna.Study, trial: Trial) -> FrozenTrial:
        launch_id = f"trial-{trial.number:04d}"
        config: Mapping[str, Any] = ds_config.merge(CONFIG, self.space.overlay(trial.params))
        continues = bool(self.root) and live_changes(self.config, config) is not None
        self.config = dict(config)
        self.root = self.root if continues else launch_id
        trial.set_user_attr(attributes.LAUNCH_ID, launch_id)
        if continues:
            trial.set_user_attr(attributes.ROOT_LAUNCH, self.root)
        result = super().answer(study, trial)
        if result.state is not TrialState.COMPLETE:
            self.root = ""
        return result


def test_guided_measures_several_trials_in_a_launch_where_starts_are_long(kit: SimpleNamespace) -> None:
    study: optuna.Study = kit.create(GuidedSampler(planner=small_planner(), seed=1), NopPruner())
    machine = Continuing()
    machine.run(study, 16)
    launches = {attributes.root_launch(trial) for trial in study.trials}
    assert len(launches) <= 12
    assert study.best_value >= 0.99 * machine.best(small_planner())


def test_a_climb_starts_at_the_largest_safe_size_of_the_lineage_unless_it_is_less_than_half() -> None:
    rows, sizes = np.array([0, 0, 0, 1]), np.array([3, 5, 8, 7])
    known = small_planner().problem
    posterior = Posterior(known, known.table.observations_of_trials([]), samples_limit=None)
    acquisition = replace(
        posterior.acquisition(rows, sizes),
        fits=np.array([0.99, 0.9, 0.6, 0.99]),
        continues=np.array([False, False, False, False]),
    )
    assert start_of_climb(rows, sizes, acquisition, 2) == 1
    assert start_of_climb(rows, sizes, acquisition, 1) == 1, "it fits"
    running = replace(acquisition, continues=np.array([False, False, True, False]))
    assert start_of_climb(rows, sizes, running, 2) == 2, "no start is lost"
    far = replace(acquisition, fits=np.array([0.99, 0.7, 0.6, 0.99]))
    assert start_of_climb(rows, sizes, far, 2) == 2, "3 is less than half of 8"


@pytest.mark.parametrize("start_s", [0.5, 100.0])
def test_a_start_costs_what_the_profile_launch_took_until_another_launch_was_measured(start_s: float) -> None:
    known = small_planner().problem
    problem = small_problem(start_s=start_s)
    nothing = Posterior(problem, known.table.observations_of_trials([]), samples_limit=None)
    rows, sizes = np.array([0, 0]), np.array([1, 8])
    assert nothing.acquisition(rows, sizes).start_s == pytest.approx(2 * start_s)
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(planner=small_planner(), seed=1))
    machine = Machine(overhead_s=7.0)
    machine.run(study, 1)
    measured = Posterior(problem, known.table.observations_of_trials(study.trials), samples_limit=None)
    assert measured.acquisition(rows, sizes).start_s == pytest.approx(2 * 7.0)


def test_a_trial_that_continues_costs_its_steps() -> None:
    problem = small_planner().problem
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(planner=small_planner(), seed=1))
    machine = Continuing()
    rows = np.flatnonzero(problem.table.engine == problem.table.engine[0])[:2]
    for row, size in ((0, 2), (0, 4)):
        study.enqueue_trial({**problem.table.lineages[row], MICRO_BATCH: size})
        machine.run(study, 1)
    observations = problem.table.observations_of_trials(study.trials)
    assert observations.waiting == 0
    other = int(np.flatnonzero(problem.table.engine != problem.table.engine[0])[0])
    posterior = Posterior(problem, observations, samples_limit=None)
    result = posterior.acquisition(np.array([rows[1], other]), np.array([2, 2]))
    assert result.cost_s[0] < 0.1 * machine.overhead_s < result.cost_s[1]


@pytest.mark.parametrize(
    ("samples_limit", "edge", "left"),
    [(None, 31, [16, 25, 29, 31, 32, 40]), (30, 31, [16, 25, 32, 40]), (30, 27, [16, 25, 29, 31, 32, 40])],
)
def test_no_micro_batch_next_to_a_trial_is_unused_where_the_data_end_them(
    samples_limit: int | None, edge: int, left: list[int]
) -> None:
    unused = UnusedSizes(small_problem(), {0: {17, 30}}, samples_limit=samples_limit)
    rows, sizes = unused.nearest(
        np.array([0]), np.array([[16, 17, 25, 29, 30, 31, 32, 40, 41]]), below=np.array([41]), edges=np.array([edge])
    )
    assert (rows.tolist(), sizes.tolist()) == ([0] * len(left), left)
