from __future__ import annotations

import re
from dataclasses import replace

import pytest

from optuna_dsat.config import ds_config
from optuna_dsat.cost import memory
from optuna_dsat.escape.markdown import code, fenced, literal, table
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.dashboard.notes import OWN_TEXT, keep_own_text, study_note, trial_note
from optuna_dsat.report.facts import memory_table
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.study.space import hardware_of
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import Feasibility, feasibility
from optuna_dsat.words import bytes_in_words, metric_in_words
from tests.harness.reports import ReportedStudyBench


def test_the_study_note_tells_best_against_the_users_own_config(view: StudyView) -> None:
    text = study_note(view)
    assert view.best is not None
    assert view.baseline is not None
    ratio = view.best.value / view.baseline.value
    assert ratio > 2
    assert metric_in_words("throughput", view.best.value) in text
    assert f"| {ratio:.2f}\u00d7 |" in text
    assert "ZeRO 2, micro-batch 2" in text
    assert f'"train_micro_batch_size_per_gpu": {view.best.trial.params["train_micro_batch_size_per_gpu"]}' in text


def test_a_note_tells_samples_per_second_first_whatever_is_optimised(view: StudyView) -> None:
    flops = replace(view, spec=view.spec.model_copy(update={"metric": "FLOPS_per_gpu"}))
    assert flops.metric == "FLOPS_per_gpu"
    assert flops.best is not None
    words = re.compile(r"\*\*\S+ samples/s, \S+ \w?FLOP/s per ")
    assert words.search(study_note(flops))
    assert words.search(trial_note(flops, flops.best.trial))


def test_the_study_note_tells_what_was_tuned_and_how_to_go_on(view: StudyView) -> None:
    text = study_note(view)
    assert "train.py --deepspeed_config ds.json" in text
    assert "| method | binary |" in text
    assert "| `zero_stage` | searched |" in text
    assert "| parameters | 1 B, 1 B trainable |" in text
    commands = text.split("```sh\n")[1].split("```")[0].splitlines()
    assert all(len(line) <= 80 or " " not in line.strip() for line in commands), "a longer line widens the page"
    assert f"optuna-dsat resume s --storage {view.storage_url}" in "\n".join(commands).replace(" \\\n ", "")
    assert "optuna-dsat best s" in text
    assert "best_ds_config.json" in text


def test_the_memory_table_has_the_formulas_and_the_micro_batches_that_ran(view: StudyView) -> None:
    assert view.profiled is not None
    rows = {row.words: row for row in memory_table(view)}
    assert len(rows) == 2 + 2 + 4
    profile, hardware = view.profiled.profile, hardware_of(view.spec, view.profiled)
    text = study_note(view)
    for words, stage, offload in (("ZeRO 1", 1, "none"), ("ZeRO 3 + optimizer offload", 3, "cpu")):
        zero = {"stage": stage, "offload_optimizer": {"device": offload}}
        config = ds_config.merge(ds_config.effective(view.spec.ds_config), {"zero_optimization": zero})
        expected = memory.estimate(profile, config, micro_batch=1, hardware=hardware)
        assert (rows[words].device_bytes, rows[words].host_bytes) == (expected.device_bytes, expected.host_bytes)
        assert bytes_in_words(expected.device_bytes) in text
    for feasible, of_row in ((Feasibility.TOO_LARGE, "too_large"), (Feasibility.FITS, "ran")):
        sizes = {t.params["train_micro_batch_size_per_gpu"] for t in view.trials if feasibility(t) is feasible}
        shown = {getattr(row, of_row) for row in rows.values()} - {None}
        assert shown
        assert shown <= sizes
    assert memory_table(replace(view, profiled=None)) == ()


def test_nvme_gets_its_rows_where_it_is_searched(view: StudyView) -> None:
    assert view.profiled is not None
    spec = view.spec.model_copy(update={"nvme_path": "/nvme", "zero_stages": (2, 3)})
    words = [row.words for row in memory_table(replace(view, spec=spec, trials=()))]
    assert "ZeRO 3 + optimizer offload to NVMe" in words
    assert "ZeRO 2 + optimizer offload to NVMe" not in words


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome.OUT_OF_MEMORY, "What to do: Nothing"),
        (Outcome.SCRIPT_ERROR, "Message: `ValueError: batch | odd`"),
        (Outcome.MEASURED, "x as fast as your config"),
    ],
)
def test_a_trials_note_says_what_happened_and_what_to_do(view: StudyView, outcome: Outcome, said: str) -> None:
    trials = [t for t in view.launched if t.user_attrs[attributes.OUTCOME] == outcome]
    text = trial_note(view, trials[-1])
    assert f"**{outcome.value.replace('_', ' ')}**" in text
    assert said in text
    assert literal(trials[-1].user_attrs[attributes.CONFIGURATION]) in text
    assert f"`{trials[-1].user_attrs[attributes.LAUNCH_ID]}`" in text


def test_a_trials_note_has_the_range_of_its_step_times(view: StudyView) -> None:
    assert view.best is not None
    launches = [row for row in view.reports[view.best.trial.number] if row.purpose == "trial"]
    times = view.step_times[launches[0].report.launch_id]
    assert len(times) == view.spec.end_profile_step - view.spec.start_profile_step + 1
    assert sum(times) <= launches[0].report.measured_s
    low, high = (metric_in_words("latency", value) for value in (min(times), max(times)))
    assert f"| {low} to {high} |" in trial_note(view, view.best.trial)


def test_a_study_with_nothing_measured_has_a_note(bench: ReportedStudyBench) -> None:
    bench.store.create_study("s", bench.spec().model_dump(mode="json"))
    text = study_note(bench.view())
    assert "Nothing has been measured yet." in text
    assert "0 of 8 launches" in text


def test_no_secret_reaches_a_note(view: StudyView) -> None:
    script = view.spec.script.model_copy(update={"args": ("--hf-token", "s3cret", "--deepspeed_config", "ds.json")})
    view = replace(view, spec=view.spec.model_copy(update={"script": script}))
    assert "s3cret" not in study_note(view)
    assert hidden_data({"comet": {"api_key": "s3cret", "project": "p"}}) == {
        "comet": {"api_key": "***", "project": "p"}
    }


def test_what_people_wrote_below_the_line_is_kept() -> None:
    first = keep_own_text("old figures", "")
    assert first.rstrip().endswith(OWN_TEXT)
    second = keep_own_text("new figures", first + "\nmine\n")
    assert "old" not in second
    assert second.rstrip().endswith("mine")
    assert keep_own_text("new figures", second) == second
    assert keep_own_text("figures", "written before").rstrip().endswith("written before")


def test_markdown_survives_pipes_backticks_and_fences() -> None:
    assert table(("a",), [("x | y\nz",)]).endswith("| x \\| y z |")
    assert code("a`b") == "`` a`b ``"
    assert fenced("```\ninner").startswith("````\n")


def test_a_winner_that_the_dashboard_ranks_lower_is_explained(view: StudyView) -> None:
    first, *_ = attributes.best_trials(view.trials, maximize=True)
    assert view.verdict is not None
    words = study_note(view)
    assert f"by these trial {first.number} is the best" in words
    assert f"The result is trial {view.verdict.result.number}, as the rounds measured it" in words
