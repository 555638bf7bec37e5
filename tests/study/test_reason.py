"""Why a trial is launched, by its attributes."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from optuna_dsat.study.search.proposals import _reason
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import FIXED_ATTR, PLAN_ATTR, RETRY_ATTR

PLAN = {PLAN_ATTR: {"reason": "larger micro-batch"}}
FIXED: dict[str, Any] = {FIXED_ATTR: {}}


@pytest.mark.parametrize(
    ("system", "user", "reason"),
    [
        (PLAN, {}, "larger micro-batch"),
        ({**PLAN, **FIXED, RETRY_ATTR: 3}, {}, "larger micro-batch"),
        (FIXED, {}, "enqueued"),
        (FIXED, {attributes.PURPOSE: attributes.USER_CONFIG}, "your config"),
        (FIXED, {attributes.SIMPLIFIES: 4}, "trial 4 without settings that may have no effect"),
        ({}, {}, ""),
    ],
)
def test_a_trial_has_the_reason_of_its_plan_also_when_it_is_tried_again(
    system: dict[str, Any], user: dict[str, Any], reason: str
) -> None:
    trial = optuna.trial.create_trial(value=1.0, system_attrs=system, user_attrs=user)
    assert _reason(trial) == reason
