from __future__ import annotations

import math

import pytest

from optuna_dsat.study.loss_check import TOLERANCES, compare

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


def test_half_precision_allows_more_than_single() -> None:
    losses = {"user": USER, "user_again": USER, "best": scaled(1.005)}
    assert compare(losses, precision="fp32").agrees is False
    assert compare(losses, precision="bf16").agrees is True
