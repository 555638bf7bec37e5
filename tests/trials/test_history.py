from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection

from optuna_dsat.trials.history import all_opened, best_lineage, best_score, read_history, same_structure
from optuna_dsat.trials.lineage import MICRO_BATCH, RETRY_ATTR

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
