"""Several studies on one page."""

from __future__ import annotations

import html
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from optuna_dsat.errors import NothingRunnableError
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.dashboard.notes import study_note
from optuna_dsat.report.figures import comparison_figure
from optuna_dsat.report.page import render
from optuna_dsat.report.view import StudyView
from optuna_dsat.report.write import _course, caveat, render_comparison, rows_of, setting_rows
from optuna_dsat.store import Store
from optuna_dsat.words import metric_in_words, times_in_words
from tests.harness.entry_points import leave
from tests.harness.landscapes import Hill
from tests.harness.pages import Page
from tests.harness.reports import ReportedStudyBench
from tests.harness.simulated import SimulatedResult


@pytest.fixture(scope="module")
def two_studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study by random search and one by guided search; not to be changed."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "train.py").write_text("")
    with Store.open(f"sqlite:///{folder / 'study.db'}") as store:
        bench = ReportedStudyBench(folder, store)
        bench.run(bench.spec(max_trials=3, confirm=0), Hill())
        bench.run(bench.spec(name="<b>t", method="guided", max_trials=5, confirm=0), Hill())
    return folder


@pytest.fixture
def two(two_studies: Path, tmp_path: Path) -> Iterator[ReportedStudyBench]:
    """A bench with a copy of their database."""
    shutil.copy(two_studies / "study.db", tmp_path)
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as store:
        yield ReportedStudyBench(tmp_path, store)


def test_a_study_without_a_result_differs_in_no_setting_and_says_how_it_ended(two: ReportedStudyBench) -> None:
    hill = Hill()
    refused = SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=5.0, message="rank 0: no memory left")
    hill.override = lambda _: refused if len(hill.configs) > 1 else None  # the first is the profile launch
    with pytest.raises(NothingRunnableError):
        two.run(two.spec(name="failed", max_trials=2, confirm=0), hill)
    views = (two.view(), two.view("<b>t"))
    settings = [(row.name, row.cells) for row in setting_rows(views)]
    assert settings
    failed = two.view("failed")
    assert [(row.name, row.cells[1:]) for row in setting_rows((failed, *views))] == settings
    page = Page(render(failed)).text
    for text in (Page(render_comparison((failed, *views))).text, page, html.unescape(study_note(failed))):
        assert "nothing could be measured: 2 out of memory" in text
    assert "Launches ended with: rank 0: no memory left" in page, "the launches are folded away"
    assert "--max-trials 4" in page, "its launches are spent"
    assert "it has not" not in page


def test_results_stand_side_by_side_with_their_ratio(two: ReportedStudyBench) -> None:
    views = (two.view(), two.view("<b>t"))
    rows = {row.name: row.cells for row in rows_of(views)}
    rates = []
    for view in views:
        assert view.best is not None
        rate = view.best.samples_per_s
        assert rate is not None
        rates.append(rate)
    assert rows["speed"] == tuple(metric_in_words("throughput", rate) for rate in rates)
    assert rows["speed per GPU"] == tuple(metric_in_words("throughput", rate / 2) for rate in rates)
    assert rows["times the first"] == ("1\u00d7", f"{times_in_words(rates[1] / rates[0])}\u00d7")
    assert "MFU" not in rows, "known of neither"
    differing = {row.name: row.cells for row in setting_rows(views)}
    assert "train_micro_batch_size_per_gpu" in differing
    assert "optimizer.type" not in differing


def test_the_page_escapes_names_and_loads_nothing(two: ReportedStudyBench) -> None:
    text = render_comparison((two.view(), two.view("<b>t"), two.view()))
    page = Page(text)
    assert page.loads == []
    assert "<b>t" not in text
    assert "<b>t" in page.text
    assert f"s ({two.store.url})" in page.text, "two of one name are told apart"
    assert {"results", "course", "settings", "tuned"} <= page.ids
    assert {target[1:] for target in page.targets} <= page.ids


def test_a_study_that_measured_nothing_may_stand_beside_one(two: ReportedStudyBench) -> None:
    two.store.create_study("new", two.spec(name="new").model_dump(mode="json"))
    views: tuple[StudyView, ...] = (two.view("new"), two.view())
    page = Page(render_comparison(views))
    assert "results" in page.ids
    assert "times the first" not in page.text
    assert "\u2013" in page.text


def test_the_command_compares_across_databases(
    two: ReportedStudyBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").write_text("")
    with Store.open(f"sqlite:///{tmp_path / 'other' / 'o.db'}") as store:
        other = ReportedStudyBench(tmp_path / "other", store)
        other.run(other.spec(max_trials=2, confirm=0), Hill())
    monkeypatch.chdir(tmp_path)
    elsewhere = f"s@sqlite:///{tmp_path / 'other' / 'o.db'}"
    assert leave("report", "s", elsewhere, "--storage", two.url) == 0
    assert capsys.readouterr().out.strip() == "comparison.html"
    page = Page((tmp_path / "comparison.html").read_text(encoding="utf-8"))
    assert "3 of 3" in page.text
    assert "2 of 2" in page.text
    assert leave("report", elsewhere, "-o", "one.html") == 0, "one of another database, too"
    assert "2 of 2" in Page((tmp_path / "one.html").read_text(encoding="utf-8")).text


def test_what_cannot_be_compared_is_one_line(two: ReportedStudyBench, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("report", "s", "nobody", "--storage", two.url) == 2
    assert "no study 'nobody'" in capsys.readouterr().err
    assert leave("report", "s", "t@postgresql://me:s3cret@host/base", "--storage", two.url) == 2
    error = capsys.readouterr().err
    assert "PGPASSFILE" in error
    assert "s3cret" not in error


def test_a_sweep_over_numbers_of_gpus_of_one_command_shows_how_samples_grow(bench: ReportedStudyBench) -> None:
    for slots in (2, 1):
        bench.run(bench.spec(name=f"at-{slots}", slots_per_trial=slots, max_trials=1, confirm=0), Hill())
    bench.store.create_study("at-4", bench.spec(name="at-4", slots_per_trial=4).model_dump(mode="json"))
    views = tuple(bench.view(f"at-{slots}") for slots in (2, 4, 1))
    rates = [view.best.samples_per_s if view.best else None for view in views]
    assert rates[0] is not None
    assert rates[2] is not None
    share = f"{rates[0] / 2 / rates[2]:.0%}"
    rows = {row.name: row.cells for row in rows_of(views)}
    assert rows["scaling"] == (share, "", "100%")
    spec = views[0].spec
    of_other_arguments = spec.model_copy(update={"script": spec.script.model_copy(update={"args": ("--layers", "9")})})
    for other in (replace(views[0], spec=of_other_arguments), views[2]):
        assert "scaling" not in [row.name for row in rows_of((views[2], other))]


def test_a_rate_is_reached_at_the_end_of_the_attempt_that_measured_it(two: ReportedStudyBench) -> None:
    view = two.view()
    assert view.best is not None
    first = next(row for row in view.launches if row.trial_number == view.best.number)
    later = replace(first.report, started_at=first.report.started_at + 1000.0)
    retried = replace(view, launches=(*view.launches, replace(first, report=later, attempt=1)))
    reached = next(seconds for seconds, rate in _course(retried) if rate == view.best.samples_per_s)
    assert reached > 1000.0


def test_long_names_leave_room_for_bars_and_what_was_not_measured_says_so() -> None:
    name = "<b>llama" + "-with-a-long-name" * 12 + "x" * 90
    figure = comparison_figure([name, "new"], best=[3.0, None], baseline=[None, None])
    lines = figure.layout.yaxis.ticktext[0].split("<br>")
    assert len(lines) == 4
    assert all(len(html.unescape(line)) <= 22 for line in lines)
    assert lines[0].startswith("&lt;b&gt;llama")
    assert lines[-1].endswith("\u2026")
    assert [list(bar.text) for bar in figure.data] == [["not measured"] * 2, ["3 samples/s", "not measured"]]


def test_a_comparison_names_users_configs_of_different_speeds() -> None:
    assert "compare speed-ups" not in caveat([])
    assert "compare speed-ups" not in caveat([10, 10.5])
    assert "Your config is 2.00x as fast in one study as in another" in caveat([10, 20, 15])
