from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.cli.plan import _print_text
from optuna_dsat.outcome import Outcome
from optuna_dsat.plan.from_script import plan_script
from optuna_dsat.plan.rows import Plan, plan_rows
from optuna_dsat.study.profile.profile import measure_profile
from optuna_dsat.study.profile.profiled import Profiled
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher, SimulatedResult
from tests.harness.studies import StudyBench

too_large = SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=10, missing_bytes=2**30)


def planned(
    bench: StudyBench,
    attempts: list[str],
    hill: Hill | None = None,
    *,
    hosts: int = 1,
    network: float | None = None,
    **changes: Any,
) -> Plan:
    return plan_script(
        bench.spec(method="guided", **changes),
        store=bench.store,
        device_names=("simulated",),
        launcher=lambda: nullcontext(SimulatedLauncher(hill or Hill(), total_slots=2)),
        on_attempt=lambda attempt: attempts.append(attempt.words),
        memory_margin=0.05,
        nodes=hosts,
        network_gbit_per_s=network,
    )


def test_a_plan_on_the_cpu_names_no_gpu_and_tokens_where_their_number_is_given(
    bench: StudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(bench, [], name="p", device="cpu")
    _print_text(plan)
    text = capsys.readouterr().out
    assert "memory at micro-batch 1" in text
    assert not any(word in text for word in ("GPU", "tokens/s", "MFU"))
    _print_text(replace(plan, subject=(subject := replace(plan.subject, seq_length=64)), rows=plan_rows(subject)))
    assert "tokens/s" in capsys.readouterr().out


def of_zero_2(plan: Plan) -> tuple[float, float, float, float]:
    """Return the predicted step of ZeRO 2 in seconds, the ends of its range, and the true step."""
    row = {row.name: row for row in plan.rows}["ZeRO 2"]
    assert row.predicted is not None
    return row.predicted.step_s, row.predicted.low_s, row.predicted.high_s, 0.03 * (row.micro_batch + 4) + 0.02


def test_a_script_is_profiled_and_timed_once_and_searches_sharpen_the_plan(bench: StudyBench) -> None:
    attempts: list[str] = []
    hill = Hill()
    before = planned(bench, attempts, hill, name="p")
    again = planned(bench, attempts, hill, name="p")
    assert attempts == ["your own ZeRO settings"]
    assert [config["train_micro_batch_size_per_gpu"] for config in hill.configs] == [1, 2, 8]
    assert "fitted to steps of your config at micro-batch 2 and 8" in before.about[-1]
    assert [row.to_json() for row in again.rows] == [row.to_json() for row in before.rows]
    assert not bench.store.list_studies()
    predicted, low, high, true = of_zero_2(before)
    assert predicted == pytest.approx(true, rel=0.1)
    assert low < true < high
    bench.run(bench.spec(method="guided", max_trials=6, confirm=0), Hill())
    after = planned(bench, attempts, hill, name="p")
    assert len(hill.configs) == 3
    assert "fitted to launches of s" in after.about[-1]
    predicted, low, high, true = of_zero_2(after)
    assert predicted == pytest.approx(true, rel=0.05)
    assert low < true < high


def test_the_larger_timed_micro_batch_has_fewer_accumulation_steps(bench: StudyBench) -> None:
    hill = Hill()
    for steps in (8, 1):  # the knobs are no part of the profile's key
        user = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps}
        plan = planned(bench, [], hill, name="p", ds_config={**user, "zero_optimization": {"stage": 2}})
        timed = [(item["train_micro_batch_size_per_gpu"], item["gradient_accumulation_steps"]) for item in hill.configs]
        assert timed == [(1, 1), (2, 8), (8, 2)]
        row = next(row for row in plan.rows if row.name == "ZeRO 2")
        assert row.predicted is not None
        assert row.predicted.step_s == pytest.approx(steps * 0.03 * (row.micro_batch + 4) + 0.02, rel=0.1)


def test_a_config_that_cannot_be_timed_is_planned_by_the_priors(bench: StudyBench) -> None:
    hill = Hill(override=lambda config: too_large if config["train_micro_batch_size_per_gpu"] == 2 else None)
    plans = [planned(bench, [], hill, name="p") for _ in range(2)]
    assert [config["train_micro_batch_size_per_gpu"] for config in hill.configs] == [1, 2]
    assert all("could not be timed" in plan.about[-1] for plan in plans)
    _, low, high, true = of_zero_2(plans[0])
    assert low < true < high


def test_what_the_script_sets_itself_is_planned(bench: StudyBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*args: Any, **keywords: Any) -> Profiled:
        profiled = measure_profile(*args, **keywords)
        return replace(profiled, config_differences={"gradient_accumulation_steps": [4, "auto"]})

    monkeypatch.setattr("optuna_dsat.plan.from_script.measure_profile", measured)
    assert {row.config["gradient_accumulation_steps"] for row in planned(bench, [], name="p").rows} == {4}


def test_a_launch_here_plans_for_several_hosts_like_this_one(bench: StudyBench) -> None:
    attempts: list[str] = []
    here = planned(bench, attempts, name="p")
    there = planned(bench, attempts, name="p", hosts=3, network=10.0)
    assert len(attempts) == 1
    assert (there.subject.hardware.world_size, there.subject.hardware.nodes) == (6, 3)
    assert here.subject.hardware.nodes == 1
    assert "3 hosts like this one: 3 x 2 ranks" in there.about[1]
    names = [row.name for row in there.rows]
    assert "ZeRO 3 + a copy in each node" in names
    states = {row.name: row.states_bytes for row in here.rows}
    assert all(row.states_bytes < states[row.name] for row in there.rows if row.name == "ZeRO 3")
    slow = planned(bench, attempts, name="p", hosts=3, network=0.1)
    rate = [next(row.samples_per_s for row in item.rows if row.name == "ZeRO 3") for item in (there, slow)]
    assert rate[1] < 0.5 * rate[0]
