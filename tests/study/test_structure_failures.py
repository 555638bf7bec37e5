"""Structures at which no launch ran, as a result states them."""

from __future__ import annotations

from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.outcome import Outcome
from optuna_dsat.study.end_reason import describe_structure_failures
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, ZERO_STAGE


def trial(stage: int, message: str = "", outcome: Outcome = Outcome.SCRIPT_ERROR) -> FrozenTrial:
    return create_trial(
        params={ZERO_STAGE: stage, MICRO_BATCH: 4},
        distributions={ZERO_STAGE: CategoricalDistribution([0, 1, 2, 3]), MICRO_BATCH: IntDistribution(1, 64)},
        state=TrialState.FAIL if message else TrialState.COMPLETE,
        value=None if message else 1.0,
        user_attrs={attributes.OUTCOME: outcome.value if message else "measured", attributes.MESSAGE: message},
    )


def test_an_error_is_stated_once_with_the_structures_that_never_ran() -> None:
    trials = [trial(0), trial(1, "rank 1: TypeError: no"), trial(2, "rank 0: TypeError: no"), trial(0, "rank 0: lr")]
    trials.append(trial(3, "no rank has moved for 31 s", Outcome.STALLED))
    assert describe_structure_failures(trials) == (
        "No launch ran at ZeRO 1, ZeRO 2: TypeError: no. No launch ran at ZeRO 3: no rank has moved for 31 s. "
        "The search tried no more at ZeRO 1, ZeRO 2, ZeRO 3."
    )


def test_failures_by_chance_are_not_stated() -> None:
    assert describe_structure_failures([trial(1, "rank 0: lost", Outcome.COMMUNICATION_ERROR), trial(2)]) == ""


def test_what_the_search_avoids_is_stated_and_a_stage_that_runs_outside_it() -> None:
    own = create_trial(
        value=1.0,
        user_attrs={
            attributes.OUTCOME: "measured",
            attributes.CONFIG: {MICRO_BATCH: 4, "zero_optimization": {"stage": 0}},
        },
    )
    trials = [own, trial(1, "rank 1: TypeError: no"), trial(2, "rank 0: TypeError: no")]
    assert describe_structure_failures(trials) == (
        "No launch ran at ZeRO 1, ZeRO 2: TypeError: no. The search tried no more at ZeRO 1, ZeRO 2, ZeRO 3. "
        "--zero-stages 0 searches the ZeRO stage that ran."
    )
