"""A stored study is the same to all who look at it: what it hands over, its space, and its speed-up."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.cli.show import show_result
from optuna_dsat.config import ds_config
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.escape.markdown import literal
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.dashboard.notes import study_note
from optuna_dsat.report.explain.explanation import explain_study
from optuna_dsat.report.page import render
from optuna_dsat.report.view import read_view
from optuna_dsat.script.batch_rule import BatchRule
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.search import warm_start
from optuna_dsat.study.search.methods import make_planner
from optuna_dsat.study.spec import ScriptSpec
from optuna_dsat.study.stored import open_study, read_stored
from optuna_dsat.trials import attributes
from optuna_dsat.words import metric_in_words
from tests.harness import present
from tests.harness.entry_points import leave
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedProfile, SimulatedResult
from tests.harness.studies import USER_CONFIG, StudyBench

pytestmark = pytest.mark.usefixtures("in_sqlite")

LIGHTNING = ScriptTrainer(framework="lightning", micro_batch=None, gradient_accumulation_steps=4, options={})


def run_with_trainer(bench: StudyBench, trainer: ScriptTrainer = LIGHTNING, **changes: Any) -> StudyResult:
    """Run a study ``s`` of a script that a trainer runs; Lightning's accumulates over four micro-batches."""
    bench.run(bench.spec(**{**changes, "name": "first", "max_trials": 1, "confirm": 0}), Hill())
    first = read_stored(bench.store, "first")
    fingerprint = str(first.attributes[attributes.FINGERPRINT])
    profiled = replace(present(first.profiled), trainer=trainer)
    bench.store.save_profile(fingerprint, profiled.to_json(), study_uuid=first.record.uuid)
    return bench.run(bench.spec(**{"max_trials": 3, "confirm": 0, **changes}), Hill())


def test_lengths_of_a_schedule_that_the_trainer_has_to_compute_are_reported_as_changed(bench: StudyBench) -> None:
    trainer = ScriptTrainer(framework="transformers", micro_batch=1, gradient_accumulation_steps=1, options={})
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "total_num_steps": 192}}
    config = {**bench.spec().ds_config, "train_micro_batch_size_per_gpu": 1, "scheduler": schedule}
    result = run_with_trainer(bench, trainer, ds_config=config)
    assert result.config["scheduler"]["params"]["warmup_num_steps"] == "auto"
    changed = {change.key: (change.own, change.best) for change in result.changes}
    assert changed["scheduler.params.warmup_num_steps"] == ("20", '"auto"')
    assert changed["scheduler.params.total_num_steps"] == ("192", '"auto"')


def test_report_and_note_advise_what_the_result_does(bench: StudyBench) -> None:
    bench.run(bench.spec(name="first", max_trials=1, confirm=0), Hill())
    first = read_stored(bench.store, "first")
    settings = bench.folder / "run.yaml"
    settings.write_text("batch: 2\n")
    rules = {
        "loader": BatchRule(kind="loader", own=2, file="/a/train.py", line=7),
        "setting": BatchRule(kind="setting", own=2, file=str(settings), key="batch"),
    }
    for name, rule in rules.items():
        profiled = replace(present(first.profiled), batch=rule)
        fingerprint = str(first.attributes[attributes.FINGERPRINT])
        bench.store.save_profile(fingerprint, profiled.to_json(), study_uuid=first.record.uuid)
        result = bench.run(bench.spec(name=name, max_trials=2, confirm=0), Hill())
        assert result.advice
        view = read_view(bench.store, name)
        assert result.advice == present(view.result).advice
        assert result.advice in re.sub("</?code>", "`", html.unescape(render(view)))
        assert literal(result.advice) in study_note(view)
        spec = view.spec
        copied = replace(view, spec=spec.model_copy(update={"script": _named(spec.script, settings)}))
        assert (result.advice == present(copied.result).advice) is (name == "loader"), "a copy of the file says it"


def _named(script: ScriptSpec, settings: Path) -> ScriptSpec:
    return script.model_copy(update={"args": (str(settings),)})


def test_best_prints_what_the_trainer_takes_and_the_spec_is_exported_as_stored(
    bench: StudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_with_trainer(bench)
    assert leave("best", "s", "--storage", bench.store.url) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((bench.folder / "out" / "s" / "best_ds_config.json").read_text()) == result.config
    assert ds_config.GRADIENT_ACCUMULATION not in printed, "Lightning refuses a config that says it"
    view = read_view(bench.store, "s")
    shown = study_note(view).partition("```json\n")[2].partition("```")[0]
    assert json.loads(shown) == printed
    assert read_stored(bench.store, "s").spec.ds_config[ds_config.GRADIENT_ACCUMULATION] == 4
    for command in ("export", "show"):
        assert leave(command, "s", "--storage", bench.store.url, *(["--json"] * (command == "show"))) == 0
        assert json.loads(capsys.readouterr().out)["spec"]["ds_config"] == USER_CONFIG


def test_all_who_look_at_a_study_see_the_space_that_it_searched(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with_trainer(bench, method="guided")
    seen: list[SearchSpace] = []

    def noted(spec: Any, profiled: Any, space: SearchSpace, **options: Any) -> Any:
        seen.append(space)
        return make_planner(spec, profiled, space, **options)

    monkeypatch.setattr(warm_start, "make_planner", noted)
    monkeypatch.setattr("optuna_dsat.study.search.methods.make_planner", noted)
    study = read_stored(bench.store, "s")
    explain_study(study)
    other = bench.spec(name="other", method="guided", options={"warm_start": "s"})
    warm_start.gather(
        bench.store, other, present(study.profiled), fingerprint=str(study.attributes[attributes.FINGERPRINT])
    )
    assert len(seen) == 2
    for space in (*seen, study.space, read_view(bench.store, "s").space):
        assert space.gradient_accumulation_steps == 4, "what the script's trainer accumulates"


class FailsAgain:
    """The user's own config is measured once; its confirmation runs out of memory."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, config: Mapping[str, Any]) -> SimulatedResult | None:
        own = config["train_micro_batch_size_per_gpu"] == USER_CONFIG["train_micro_batch_size_per_gpu"]
        self.runs += own
        again = own and self.runs > 1
        return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=1) if again else None


def test_a_confirmed_winner_is_not_compared_with_a_user_config_that_could_not_be_confirmed(
    bench: StudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench.run(bench.spec(max_trials=4, confirm=1), Hill(FailsAgain()), noise=0.1)
    study = read_stored(bench.store, "s")
    assert study.best is not None
    assert study.baseline is not None
    assert (study.best.rounds > 0, study.baseline.rounds) == (True, 0)
    searched = study.best.searched_value / study.baseline.searched_value
    assert searched != pytest.approx(study.best.value / study.baseline.value, rel=1e-4), "noise tells them apart"
    explained, _ = explain_study(study)
    assert result.value == study.best.value
    assert result.speed_up == pytest.approx(searched)
    assert result.user_value == study.baseline.searched_value
    assert present(study.best.speed_up).value == explained.speed_up == result.speed_up
    assert not result.speed_up_confirmed
    capsys.readouterr()
    show_result(result, as_json=False)
    assert "Your config could not be measured again; compared with its " in capsys.readouterr().out


class UncountedFlops(Hill):
    """A model whose FLOPs cannot be counted."""

    def profile(self, slots: int) -> SimulatedProfile:
        return replace(super().profile(slots), flops_per_sample=0)


def test_a_study_is_shown_in_the_metric_that_it_optimised(
    bench: StudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench.run(bench.spec(metric="FLOPS_per_gpu", max_trials=3, confirm=0), UncountedFlops())
    assert result.metric == "throughput"
    number, unit = metric_in_words("throughput", result.value).split()
    for command in (["show", "s"], ["trials", "s"], ["studies"]):
        assert leave(*command, "--storage", bench.store.url) == 0
        printed = capsys.readouterr().out
        assert {number, unit} <= set(re.split(r"[\s,:]+", printed)), command
        assert "FLOP" not in printed, command


def test_a_study_that_another_process_creates_in_the_same_moment_is_joined(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two commands ended: free memory, by which a CPU rank is limited, differs between them."""
    first, second = (bench.spec(device="cpu", free_memory=True, device_memory_bytes=size) for size in (2**30, 2**31))
    record, _ = open_study(bench.store, first)
    find, early = bench.store.find_study, iter([None])
    monkeypatch.setattr(bench.store, "find_study", lambda name: next(early, find(name)))
    assert open_study(bench.store, second)[0].uuid == record.uuid
