from __future__ import annotations

import math

import pytest

from optuna_dsat.study.confirm.loss_check import TOLERANCES, compare
from optuna_dsat.study.stored import record_of
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher
from tests.harness.studies import StudyBench

USER = [2.0, 1.5, 1.2]


def scaled(factor: float) -> list[float]:
    return [loss * factor for loss in USER]


@pytest.mark.parametrize(
    ("again", "best", "agrees"),
    [
        (USER, USER, True),
        (USER, scaled(1 + 5e-5), True),
        (USER, scaled(1.01), False),
        (scaled(1.05), scaled(1.01), None),
        (scaled(1.05), USER, True),
        (USER, [2.0, 1.5, math.inf], False),
        (USER, [2.0, 1.5], None),
        ([], [], None),
    ],
)
def test_losses_are_compared_against_precision_and_the_scripts_own_noise(
    again: list[float], best: list[float], agrees: bool | None
) -> None:
    check = compare({"user": USER, "user_again": again, "best": best}, precision="fp32")
    assert check.agrees is agrees
    assert check.tolerance == TOLERANCES["fp32"]
    assert check.message.endswith(".")


def test_equal_losses_agree_within_nothing_that_needs_a_number() -> None:
    check = compare({"user": USER, "user_again": USER, "best": USER}, precision="fp32")
    assert check.message == "The first 3 losses are the same."


def test_where_the_users_own_config_is_the_result_no_losses_are_compared(bench: StudyBench) -> None:
    """Three launches compared it with itself, and told that its losses agree within 0.0e+00."""
    launcher = SimulatedLauncher(Hill(), total_slots=2)
    result = bench.session(bench.spec(max_trials=1, confirm=0), launcher, check_loss=True).run()
    assert result is not None
    assert result.loss_check is not None
    assert (result.loss_check["agrees"], result.loss_check["losses"]) == (True, {})
    assert result.loss_check["message"].startswith("Your config is the result")
    assert {launch.purpose for launch in bench.store.launches(record_of(bench.store, "s").uuid)} == {"profile", "trial"}


def test_half_precision_allows_more_than_single() -> None:
    losses = {"user": USER, "user_again": USER, "best": scaled(1.005)}
    assert compare(losses, precision="fp32").agrees is False
    assert compare(losses, precision="bf16").agrees is True


@pytest.mark.parametrize(
    ("best", "agrees"),
    [
        ([5.0, 4.8, 4.3, 3.8, 3.3], True),  # from the second step on, less than a step late
        ([5.0, 4.8, 4.6, 4.4, 4.2], False),  # ever later, as if updates were lost
        ([5.0, 4.8, math.inf, 3.8, 3.3], False),
    ],
)
def test_weights_that_are_rounded_to_bf16_may_be_a_step_late(best: list[float], agrees: bool) -> None:
    user = [5.0, 4.5, 4.0, 3.5, 3.0]
    losses = {"user": user, "user_again": user, "best": best}
    assert compare(losses, precision="bf16").agrees is False
    check = compare(losses, precision="bf16", rounds_weights=True)
    assert (check.agrees, "up to a step late" in check.message) == (agrees, agrees)


def test_losses_that_are_not_finite_allow_no_delay() -> None:
    losses = {"user": [5.0, math.inf], "user_again": [5.0, math.inf], "best": [9.0, math.inf]}
    assert compare(losses, precision="bf16", rounds_weights=True).agrees is False
