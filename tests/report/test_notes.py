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
from optuna_dsat.study.space import hardware_of
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import Feasibility, feasibility
from tests.harness.reports import ReportedStudyBench


def test_a_note_tells_samples_per_second_first_whatever_is_optimised(view: StudyView) -> None:
    flops = replace(view, spec=view.spec.model_copy(update={"metric": "FLOPS_per_gpu"}))
    assert flops.metric == "FLOPS_per_gpu"
    assert flops.best is not None
    words = re.compile(r"\*\*\S+ samples/s, \S+ \w?FLOP/s per ")
    assert words.search(study_note(flops))
    assert words.search(trial_note(flops, flops.best.trial))


def test_the_memory_table_has_the_formulas_and_the_micro_batches_that_ran(view: StudyView) -> None:
    assert view.profiled is not None
    rows = {row.words: row for row in memory_table(view)}
    assert len(rows) == 2 + 2 + 4
    profile, hardware = view.profiled.profile, hardware_of(view.spec, view.profiled)
    text = study_note(view)
    commands = text.split("```sh\n")[1].split("```")[0].splitlines()
    assert all(len(line) <= 80 or " " not in line.strip() for line in commands), "a longer line widens the page"
    for words, stage, offload in (("ZeRO 1", 1, "none"), ("ZeRO 3 + optimizer offload", 3, "cpu")):
        zero = {"stage": stage, "offload_optimizer": {"device": offload}}
        config = ds_config.merge(ds_config.effective(view.spec.ds_config), {"zero_optimization": zero})
        expected = memory.estimate(profile, config, micro_batch=1, hardware=hardware)
        assert (rows[words].device_bytes, rows[words].host_bytes) == (expected.device_bytes, expected.host_bytes)
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


def test_a_study_with_nothing_measured_has_a_note(bench: ReportedStudyBench) -> None:
    bench.store.create_study("s", bench.spec().model_dump(mode="json"))
    text = study_note(bench.view())
    assert "Nothing has been measured yet." in text
    assert "0 of 8 trials" in text


def test_no_secret_reaches_a_note(view: StudyView) -> None:
    script = view.spec.script.model_copy(update={"args": ("--hf-token", "s3cret", "--deepspeed_config", "ds.json")})
    view = replace(view, spec=view.spec.model_copy(update={"script": script}))
    assert "s3cret" not in study_note(view)


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
