from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.cli.plan import _print_text
from optuna_dsat.plan.from_script import plan_script
from optuna_dsat.plan.rows import Plan, plan_rows
from optuna_dsat.study.profile.profile import measure_profile
from optuna_dsat.study.profile.profiled import Profiled
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher
from tests.harness.studies import StudyBench


def planned(
    bench: StudyBench, attempts: list[str], *, hosts: int = 1, network: float | None = None, **changes: Any
) -> Plan:
    return plan_script(
        bench.spec(method="guided", **changes),
        store=bench.store,
        device_names=("simulated",),
        launcher=lambda: nullcontext(SimulatedLauncher(Hill(), total_slots=2)),
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


def test_a_profile_is_measured_once_and_searches_sharpen_the_plan(bench: StudyBench) -> None:
    attempts: list[str] = []
    before = planned(bench, attempts, name="p")
    again = planned(bench, attempts, name="p")
    assert attempts == ["your own ZeRO settings"]
    assert again.subject == before.subject
    assert not bench.store.list_studies()
    bench.run(bench.spec(method="guided", max_trials=6, confirm=0), Hill())
    after = planned(bench, attempts, name="p")
    assert len(attempts) == 1
    assert "fitted to launches of s" in after.about[-1]
    vague, sharp = ({row.name: row for row in plan_rows(item.subject)}["ZeRO 2"] for item in (before, after))
    assert vague.predicted is not None
    assert sharp.predicted is not None
    assert sharp.predicted.high_s / sharp.predicted.low_s < 0.5 * vague.predicted.high_s / vague.predicted.low_s
    true_s = 0.03 * (sharp.micro_batch + 4) + 0.02
    assert sharp.predicted.low_s < true_s < sharp.predicted.high_s


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
