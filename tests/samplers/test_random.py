from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.samplers import LineageRandomSampler
from optuna_dsat.trials.lineage import MICRO_BATCH, PLAN_ATTR, group


@pytest.mark.parametrize("budget", [1, 3, 5])
def test_a_lineage_has_its_budget_and_no_more(kit: SimpleNamespace, budget: int) -> None:
    study = kit.create(LineageRandomSampler(seed=0, trials_per_random_config=budget))
    kit.Driver(study).run(30)
    counts = [len(o.trials) for o in group(study.trials).values()]
    assert max(counts) == budget


def test_bounds_follow_the_answers(kit: SimpleNamespace) -> None:
    study = kit.create(LineageRandomSampler(seed=0, trials_per_random_config=9))
    kit.Driver(study, suggest=partial(kit.suggest, stages=(2,), wide=False)).run(8)
    (lineage,) = group(study.trials).values()
    low, high = 1, 64
    for trial in lineage.trials:
        plan = trial.system_attrs[PLAN_ATTR]
        assert (plan["low"], plan["high"]) == (low, high)
        assert low <= lineage.size(trial) <= high
        if lineage.size(trial) <= 21:
            low = lineage.size(trial) + 1
        else:
            high = lineage.size(trial) - 1
        if low > high:
            break


def test_a_success_at_the_soft_ceiling_raises_it(kit: SimpleNamespace) -> None:
    two: Any = SimpleNamespace(largest_fit=lambda *_: 2, largest_worth=lambda *_: None, draw=lambda *_, **__: None)
    sampler = LineageRandomSampler(seed=0, planner=two)
    study = kit.create(sampler)
    kit.Driver(study, suggest=partial(kit.suggest, stages=(3,), wide=False)).run(5)
    result = [t.params[MICRO_BATCH] for t in study.trials]
    assert result[0] <= 2
    assert max(result) > 4
    assert max(result) <= 64


def test_the_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="trials_per_random_config must be at least 1, not 0"):
        LineageRandomSampler(trials_per_random_config=0)
