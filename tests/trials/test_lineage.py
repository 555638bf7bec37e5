from __future__ import annotations

import math
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.outcome import Outcome
from optuna_dsat.trials import attributes
from optuna_dsat.trials.history import all_opened, best_lineage, best_score, read_history, same_structure
from optuna_dsat.trials.lineage import (
    MICRO_BATCH,
    PLAN_ATTR,
    RETRY_ATTR,
    Feasibility,
    agrees,
    feasibility,
    group,
    lineage_key,
    middle,
    score,
    search_interval,
    unreachable,
    unused_micro_batches,
)

SIZE = IntDistribution(1, 64, log=True)
STAGE = CategoricalDistribution([1, 2, 3])


def make(
    number: int,
    size: int | None = None,
    *,
    stage: int = 1,
    state: TrialState = TrialState.COMPLETE,
    value: float | None = None,
    outcome: Outcome | None = None,
    reports: dict[int, float] | None = None,
    vetoed: str | None = None,
    system: dict[str, Any] | None = None,
) -> FrozenTrial:
    user: dict[str, Any] = {}
    if outcome is not None:
        user[attributes.OUTCOME] = outcome.value
    if vetoed is not None:
        user[attributes.VETOED] = vetoed
    params: dict[str, Any] = {"zero_stage": stage}
    distributions: dict[str, Any] = {"zero_stage": STAGE}
    if size is not None:
        params[MICRO_BATCH] = size
        distributions[MICRO_BATCH] = SIZE
    trial = create_trial(
        state=state,
        value=1.0 if state == TrialState.COMPLETE and value is None else value,
        params=params,
        distributions=distributions,
        user_attrs=user,
        system_attrs=system,
        intermediate_values=reports,
    )
    trial.number = number
    return trial


PRUNED, FAIL, RUNNING, WAITING = TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, Feasibility.FITS),
        ({"state": PRUNED, "outcome": Outcome.PRUNED, "reports": {3: 1.0}}, Feasibility.FITS),
        ({"state": PRUNED, "outcome": Outcome.PRUNED}, Feasibility.UNKNOWN),
        ({"state": PRUNED, "outcome": Outcome.OUT_OF_MEMORY}, Feasibility.TOO_LARGE),
        ({"state": PRUNED, "outcome": Outcome.HOST_OUT_OF_MEMORY}, Feasibility.TOO_LARGE),
        ({"state": PRUNED, "outcome": Outcome.OUT_OF_MEMORY, "reports": {3: 1.0}}, Feasibility.TOO_LARGE),
        ({"state": PRUNED}, Feasibility.TOO_LARGE),
        ({"state": PRUNED, "reports": {1: 1.0}}, Feasibility.FITS),
        ({"state": PRUNED, "vetoed": "duplicate"}, Feasibility.UNKNOWN),
        ({"state": FAIL, "outcome": Outcome.INVALID_CONFIG}, Feasibility.BROKEN),
        ({"state": FAIL, "outcome": Outcome.SCRIPT_ERROR}, Feasibility.BROKEN),
        ({"state": FAIL, "outcome": Outcome.STALLED}, Feasibility.BROKEN),
        ({"state": FAIL, "outcome": Outcome.LOST}, Feasibility.UNKNOWN),
        ({"state": FAIL}, Feasibility.UNKNOWN),
        ({"state": RUNNING, "reports": {3: 1.0}}, Feasibility.UNKNOWN),
        ({"state": WAITING}, Feasibility.UNKNOWN),
    ],
)
def test_feasibility(kwargs: dict[str, Any], expected: Feasibility) -> None:
    assert feasibility(make(0, 8, **kwargs)) is expected


def test_score_is_the_value_or_the_last_report_of_a_stopped_job() -> None:
    assert score(make(0, 8, value=5.0)) == 5.0
    stopped = make(0, 8, state=PRUNED, outcome=Outcome.PRUNED, reports={3: 1.0, 4: 2.0})
    assert score(stopped) == 2.0
    assert score(make(0, 8, state=PRUNED, outcome=Outcome.OUT_OF_MEMORY)) is None
    assert score(make(0, 8, state=PRUNED, outcome=Outcome.PRUNED, reports={3: math.nan})) is None


def test_a_lineage_collects_what_its_trials_say() -> None:
    trials = [
        make(0, 16, value=10.0),
        make(1, 32, state=PRUNED, outcome=Outcome.OUT_OF_MEMORY),
        make(2, 24, state=FAIL, outcome=Outcome.LOST),
        make(3, 24, state=PRUNED, vetoed="duplicate"),
        make(4, 20, state=RUNNING),
        make(5, 4, stage=2),
    ]
    first, second = group(trials).values()
    assert (first.params, second.params) == ({"zero_stage": 1}, {"zero_stage": 2})
    assert (first.largest_fit, first.smallest_too_large) == (16, 32)
    assert [t.number for t in first.conclusive] == [0, 1]
    assert first.running == (20,)
    assert first.used == {16, 20, 24, 32}
    assert search_interval(first, 64) == (17, 31)
    assert search_interval(first, 25) == (17, 25)
    assert not first.dead
    assert not first.broken


def test_best_takes_measured_trials_best_score_stopped_ones_too() -> None:
    stopped = make(1, 16, state=PRUNED, outcome=Outcome.PRUNED, reports={3: 9.0})
    (lineage,) = group([make(0, 8, value=5.0), stopped, make(2, 12, value=7.0)]).values()
    best = lineage.best(StudyDirection.MAXIMIZE)
    assert best is not None
    assert best.number == 2
    assert lineage.best_score(StudyDirection.MAXIMIZE) == 9.0
    assert lineage.best_score(StudyDirection.MAXIMIZE, first=1) == 5.0
    assert lineage.best_score(StudyDirection.MINIMIZE) == 5.0


def test_foreign_trials_are_left_out_and_order_is_by_first_trial() -> None:
    trials = [make(2, 8, stage=1), make(1, 8, stage=3), make(0), make(3, 9, stage=3)]
    assert [o.params["zero_stage"] for o in group(trials).values()] == [3, 1]


def test_running_trials_are_known_by_plan_or_by_what_they_were_enqueued_with() -> None:
    planned = make(0, state=RUNNING, system={PLAN_ATTR: {"lineage": {"zero_stage": 3}, "micro_batch": 7}})
    planned.params = {}
    waiting = make(1, state=WAITING, system={"fixed_params": {"zero_stage": 2, MICRO_BATCH: 5}})
    waiting.params = {}
    undecided = make(2, state=RUNNING, system={PLAN_ATTR: {"draw": 2}})
    result = {o.params["zero_stage"]: o.running for o in group([planned, waiting, undecided]).values()}
    assert result == {3: (7,), 2: (5,)}


def test_a_lineage_that_turned_into_another_is_unreachable() -> None:
    plan = {PLAN_ATTR: {"lineage": {"zero_stage": 1, "lr": 0.1}, "micro_batch": 8}}
    strayed = make(0, 8, system=plan)
    assert unreachable([strayed, make(1, 4)]) == {lineage_key({"zero_stage": 1, "lr": 0.1})}


def test_keys_do_not_depend_on_order_or_on_how_a_number_is_written() -> None:
    assert lineage_key({"b": 5e7, "a": True}) == lineage_key({"a": True, "b": 50000000, MICRO_BATCH: 3})
    assert lineage_key({"a": True}) != lineage_key({"a": 1})


def test_agrees_compares_what_both_have_unless_strict() -> None:
    assert agrees({"zero_stage": 1}, {"offload_param": "cpu"})
    assert not agrees({"zero_stage": 1}, {"offload_param": "cpu"}, strict=True)
    assert not agrees({"zero_stage": 1}, {"zero_stage": 2})
    assert not agrees({"overlap_comm": 1}, {"overlap_comm": True})
    assert agrees({"reduce_bucket_size": 50000000}, {"reduce_bucket_size": 5e7}, strict=True)


def test_dead() -> None:
    (dead,) = group([make(0, 1, state=PRUNED, outcome=Outcome.OUT_OF_MEMORY)]).values()
    assert dead.dead


@pytest.mark.parametrize(
    ("low", "high", "distribution", "used", "expected"),
    [
        (1, 5, IntDistribution(1, 64), (), [1, 2, 3, 4, 5]),
        (0, 99, IntDistribution(2, 4), (), [2, 3, 4]),
        (3, 9, IntDistribution(2, 18, step=4), (), [6]),
        (1, 5, IntDistribution(1, 64), (3, 77), [1, 2, 4, 5]),
        (6, 5, IntDistribution(1, 64), (), []),
    ],
)
def test_unused_micro_batches(
    low: int, high: int, distribution: IntDistribution, used: tuple[int, ...], expected: list[int]
) -> None:
    assert list(unused_micro_batches(low, high, distribution, used=used)) == expected


def test_middle_is_that_of_bisection() -> None:
    for low in range(1, 6):
        for high in range(low, 20):
            assert middle(range(low, high + 1)) == (low + high) // 2


def test_infinite_and_multi_objective_values_do_not_break_scores() -> None:
    assert score(make(0, 8, value=math.inf)) == math.inf
    several = optuna.trial.create_trial(values=[1.0, 2.0], params={}, distributions={})
    assert score(several) is None


UP = StudyDirection.MAXIMIZE
SPACE: dict[str, BaseDistribution] = {
    "zero_stage": CategoricalDistribution([1, 2, 3]),
    "offload_param": CategoricalDistribution(["none", "cpu"]),
    MICRO_BATCH: IntDistribution(1, 64, log=True),
}


def add(study: optuna.Study, value: float, **params: Any) -> None:
    knobs = {**params, MICRO_BATCH: 4}
    trial = optuna.create_trial(
        value=value, params=knobs, distributions={name: SPACE[name] for name in knobs}, system_attrs={RETRY_ATTR: 0}
    )
    study.add_trial(trial)


def test_a_history_leaves_out_the_trial_to_decide_on() -> None:
    study = optuna.create_study()
    add(study, 1.0, zero_stage=1)
    study.enqueue_trial({"zero_stage": 2, MICRO_BATCH: 8})
    study.ask()
    asked = study.ask()
    history = read_history(study, without=asked.number)
    assert [trial.number for trial in history.trials] == [0, 1]
    assert ([t.number for t in history.finished], [t.number for t in history.pending]) == ([0], [1])
    assert [lineage.params for lineage in history.lineages.values()] == [{"zero_stage": 1}, {"zero_stage": 2}]
    assert (history.retries_before(0), history.retries_before(5)) == (0, 1)


def test_a_space_is_opened_once_every_choice_is_opened_or_hopeless() -> None:
    study = optuna.create_study(direction="maximize")
    for value, params in ((1.0, {"zero_stage": 1}), (3.0, {"zero_stage": 3, "offload_param": "none"})):
        add(study, value, **params)
    lineages = read_history(study).lineages
    opened = list(lineages.values())
    assert all_opened({"zero_stage": 1}, opened)
    assert not all_opened({"zero_stage": 3}, opened)
    assert all_opened({"zero_stage": 3}, opened, [{"zero_stage": 3, "offload_param": "cpu"}])
    assert not all_opened({}, opened, [{"zero_stage": 3}])  # stage 2
    assert all_opened({}, opened, [{"zero_stage": 2}, {"zero_stage": 3}])
    assert best_score(opened, UP) == 3.0
    assert best_lineage(same_structure(lineages, {"zero_stage": 1, "bucket": 5}), UP) is opened[0]
    assert best_lineage([], UP) is None


def test_what_a_stop_took_and_what_answers_another_question_is_no_launch_without_a_new_best() -> None:
    def ended(number: int, value: float, outcome: Outcome = Outcome.MEASURED, **attrs: Any) -> FrozenTrial:
        state = TrialState.FAIL if outcome is Outcome.LOST else TrialState.COMPLETE
        trial = make(number, 8, state=state, value=None if state is TrialState.FAIL else value, outcome=outcome)
        trial.set_user_attr(attributes.LAUNCH_ID, f"trial-{number}")
        for name, attr in attrs.items():
            trial.set_user_attr(name, attr)
        return trial

    trials = [ended(0, 9.0), ended(1, 8.0), ended(2, 0.0, Outcome.LOST), ended(3, 7.0, same_batch="predicted")]
    assert attributes.launches_since_best(trials, maximize=True) == 1
    assert attributes.launches_since_best(trials[:1], maximize=True) == 0
    assert attributes.launches_since_best([], maximize=True) == 0
