"""Settings that change numbers: searched with permission, and in a result only if their losses agree."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.cli.show import show_result
from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import BF16_STATES
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.facts import advice_on
from optuna_dsat.study.confirm.loss_check import TOLERANCES, check_loss, compare, is_of_losses
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.stored import read_stored, record_of
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher, SimulatedProfile, SimulatedResult
from tests.harness.studies import USER_CONFIG, StudyBench

IN_FP32 = {key: value for key, value in USER_CONFIG.items() if key != "bf16"}


@dataclass
class Lossy(Hill):
    """A hill on which bf16 states and bf16 for fp32 are faster and have another loss."""

    loss: float = 1.0
    in_fp32: bool = False

    def profile(self, slots: int) -> SimulatedProfile:
        return replace(super().profile(slots), param_bytes=4 if self.in_fp32 else 2)

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        result = super().run(ds_config, slots)
        bf16 = ds_config.get("bf16", {})
        if not bf16.get("enabled" if self.in_fp32 else BF16_STATES):
            return replace(result, loss=1.0)
        return replace(result, forward_s=result.forward_s / 3, backward_s=result.backward_s / 3, loss=self.loss)


def tuned(bench: StudyBench, hill: Lossy, **changes: Any) -> StudyResult:
    return bench.run(bench.spec(**{"method": "guided", "max_trials": 8, "allow": ("lossy",), **changes}), hill)


def loss_launches(bench: StudyBench) -> list[str]:
    launches = bench.store.launches(record_of(bench.store, "s").uuid)
    return [row.report.launch_id for row in launches if is_of_losses(row.report.launch_id)]


def test_a_result_that_changes_numbers_was_compared(bench: StudyBench, capsys: pytest.CaptureFixture[str]) -> None:
    result = tuned(bench, Lossy(loss=1.001))
    assert result.config["bf16"] == {"enabled": True, BF16_STATES: True, "bf16_master_weights_and_grads": True}
    launched = loss_launches(bench)
    assert [name.rpartition("-")[2] for name in launched] == ["user", "again", "best"]
    assert result.loss_check is not None
    assert result.loss_check["agrees"] is True
    assert len(result.loss_check["losses"]["best"]) == 20
    words = f"Trial {result.trial} changes numbers (bf16_optimizer_states=true, bf16_master_weights_and_grads=true)."
    assert result.numbers.startswith(words)
    assert "agree within" in result.numbers
    assert result.numbers in advice_on(result)
    show_result(result, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines).index("changes numbers") < " ".join(lines).index("Config:")
    record = json.loads((bench.folder / "out" / "s" / "best_ds_metrics.json").read_text())
    assert record["loss_check"]["agrees"] is True
    assert json.loads(json.dumps(result.to_json()))["numbers"] == result.numbers


@pytest.mark.parametrize("confirm", [3, 0])
def test_a_config_whose_losses_differ_is_not_the_result(bench: StudyBench, confirm: int) -> None:
    hill = Lossy(loss=1.5)
    result = tuned(bench, hill, confirm=confirm)
    assert any(config["bf16"].get(BF16_STATES) for config in hill.configs)
    assert BF16_STATES not in result.config["bf16"]
    assert result.numbers == ""
    assert "No result has bf16_optimizer_states=true" in result.rejected
    assert "The first losses differ by 3.3e-01" in result.rejected
    study = read_stored(bench.store, "s")
    assert study.measured[0].params[BF16_STATES] is True, "it was the fastest"
    assert study.verdict is not None
    assert study.verdict.result.number == result.trial
    assert study.verdict.measured.keys() == {trial.number for trial in study.measured}
    if result.same_batch is not None:
        assert BF16_STATES not in result.same_batch.config["bf16"]
    before = len(loss_launches(bench))
    assert before == 3
    again = tuned(bench, hill, confirm=confirm)  # the study is continued with its comparison
    assert (again.trial, len(loss_launches(bench))) == (result.trial, before)


def test_bf16_for_fp32_is_measured_and_its_tolerance_is_that_of_bf16(bench: StudyBench) -> None:
    result = tuned(bench, Lossy(loss=1.01, in_fp32=True), ds_config=IN_FP32)
    assert ds_config.precision_of(result.config) == "bf16"
    assert result.loss_check is not None
    assert result.loss_check["precision"] == "bf16"
    assert "The fastest trial in bf16 measured" in result.advice
    assert "x as fast as the fastest in fp32." in result.advice
    assert any(change.key == "bf16.enabled" for change in result.changes)


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
    if best == again == USER:
        assert check.message == "The first 3 losses are the same."


@pytest.mark.parametrize(("own", "best"), [(None, 4), (4, 4), (4, None), (None, 30)])
def test_losses_are_compared_at_the_same_steps_of_the_script_if_zenflow_counts_several_as_one(
    bench: StudyBench, own: int | None, best: int | None
) -> None:
    def zero(interval: int | None) -> dict[str, Any]:
        return {"stage": 2, "zenflow": None if interval is None else {"update_interval": interval}}

    def launch(request: LaunchRequest) -> tuple[Any, Any]:
        each = (ds_config.zero_section(request.ds_config).get("zenflow") or {}).get("update_interval", 1)
        steps = range(each, each * request.end_profile_step + 1, each)
        boundaries = [SimpleNamespace(loss=1 / step) for step in steps]
        return SimpleNamespace(boundaries=boundaries), SimpleNamespace(outcome=Outcome.MEASURED)

    spec = bench.spec(ds_config={**USER_CONFIG, "zero_optimization": zero(own)})
    check = check_loss(spec, {"zero_optimization": zero(best)}, data_parallel_size=2, launch=launch)
    assert check.difference == 0


def test_where_the_users_own_config_is_the_result_no_losses_are_compared(bench: StudyBench) -> None:
    """Three launches compared it with itself, and told that its losses agree within 0.0e+00."""
    launcher = SimulatedLauncher(Hill(), total_slots=2)
    result = bench.run_by(launcher, bench.spec(max_trials=1, confirm=0), check_loss=True)
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
