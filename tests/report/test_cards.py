"""The key figures of the report, why it is the best, and links to launches: what is not known is left out."""

from __future__ import annotations

import os
import urllib.parse
from dataclasses import replace
from pathlib import Path

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.outcome import Outcome
from optuna_dsat.report import figures
from optuna_dsat.report.cards import _training, answers_of
from optuna_dsat.report.explain.explanation import explained
from optuna_dsat.report.explain.prediction_gap import prediction_gap
from optuna_dsat.report.facts import Training, training_times
from optuna_dsat.report.launch_files import Links
from optuna_dsat.report.page import render, sections_of
from optuna_dsat.report.template import _prose
from optuna_dsat.report.view import StudyView
from optuna_dsat.report.write import rows_of
from optuna_dsat.trials import attributes
from optuna_dsat.words import metric_in_words, times_in_words
from tests.harness import present
from tests.harness.landscapes import Hill
from tests.harness.pages import Page
from tests.harness.reports import ReportedStudyBench
from tests.harness.simulated import SimulatedResult


def on_a_gpu(view: StudyView, name: str) -> StudyView:
    """Return a study as if its device had this name."""
    assert view.profiled is not None
    profile = replace(view.profiled.profile, device_name=name)
    return replace(view, profiled=replace(view.profiled, profile=profile))


def test_tokens_and_mfu_are_shown_where_they_are_known(view: StudyView) -> None:
    known = on_a_gpu(view, "NVIDIA H100 80GB HBM3")
    best, verdict = known.best, known.verdict
    assert best is not None
    rate = present(best.samples_per_s)
    best = replace(best, metrics={**best.metrics, "tokens_per_s": rate * 2048})
    vars(known)["verdict"] = replace(present(verdict), result=best)
    cards = Page(render(known)).cards
    assert cards["Tokens"][0] == metric_in_words("tokens_per_s", rate * 2048)
    flops = 6e12 * rate / known.spec.slots_per_trial
    assert float(cards["MFU"][0].rstrip("%")) == pytest.approx(100 * flops / 989.5e12, rel=0.02)


def test_speed_comes_first_as_samples_whatever_is_optimised(bench: ReportedStudyBench) -> None:
    bench.run(bench.spec(max_trials=3, confirm=2, metric="FLOPS_per_gpu"), Hill())
    view = bench.view()
    assert view.metric == "FLOPS_per_gpu"
    assert view.best is not None
    best = view.best
    assert best.samples_per_s is not None
    assert best.metrics["FLOPS_per_gpu"] > 0
    page = Page(render(view))
    assert answers_of(view)[-1].bars[-1].value == metric_in_words("throughput", best.samples_per_s)
    assert page.cards["Arithmetic"][0] == metric_in_words("FLOPS_per_gpu", best.metrics["FLOPS_per_gpu"])
    low, high = (view.best.interval.low, view.best.interval.high)
    assert high is not None
    scaled = metric_in_words("throughput", present(low) * best.samples_per_s / view.best.value).split()[0]
    assert f"{scaled} to" in page.text
    assert "samples/s in rounds" in page.text
    assert all("samples/s" in str(plot(view).layout) for plot in (figures.plot_metric, figures.plot_progress))


def test_what_a_training_saves_is_told_where_the_data_is_known(view: StudyView, rendered: str) -> None:
    assert training_times(view, Training()) is None
    assert not [name for name in Page(rendered).cards if "poch" in name]
    training = Training(epochs=3, price_per_gpu_hour=2.5, dataset_size=10_000_000)
    times = present(training_times(view, training))
    rate = present(present(view.best).samples_per_s)
    assert times.best_s == pytest.approx(30_000_000 / rate)
    assert times.saved_slot_hours == pytest.approx((present(times.own_s) - times.best_s) * 2 / 3600)
    _, remark = Page(render(view, training=training)).cards["3 epochs"]
    assert (
        f"saves {times.saved_slot_hours:.3g} GPU hours, {times.saved_slot_hours * 2.5:,.2f} at 2.50 per GPU hour"
        in remark
    )
    assert "on 10,000,000 samples" in remark


def test_a_study_of_a_phase_that_the_engine_does_not_show_has_a_report(bench: ReportedStudyBench) -> None:
    launch = SimulatedResult(startup_s=1, forward_s=0.1, backward_s=0.2)
    with pytest.raises(UsageError, match="does not show this phase"):
        bench.run(bench.spec(metric="step"), Hill(override=lambda _: launch))
    assert "0 ms" in Page(render(bench.view())).text


def test_what_a_training_takes_is_told_of_the_own_config_too_and_each_launch_by_what_it_was_for(
    bench: ReportedStudyBench,
) -> None:
    """``--dataset-size`` did nothing there, and losses were compared by "9 to measure finalists again"."""
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    view = bench.view()
    confirm = replace(view.launches[-1], purpose="confirm")
    losses = replace(confirm, report=replace(confirm.report, launch_id="loss-user"))
    view = replace(view, launches=(*view.launches, confirm, losses, losses))
    assert all(section.missing for section in sections_of(view)), "a figure of a single point says nothing"
    rate = present(present(view.best).samples_per_s)
    training = Training(epochs=3, price_per_gpu_hour=2.5, dataset_size=10_000_000)
    cards = Page(render(view, training=training)).cards
    hours = 2 * 30_000_000 / rate / 3600
    assert cards["3 epochs"][1] == f"on 10,000,000 samples: {2.5 * hours:,.2f} at 2.50 per GPU hour"
    times = replace(present(training_times(view, training)), own_s=None)
    assert _training(times, "cuda").remark == cards["3 epochs"][1], "nor was the own config measured"
    assert cards["Trials"][1] == "further launches: 1 to profile, 1 to measure finalists again, 2 to compare losses"
    other = {row.name: row.cells for row in rows_of((view, view), training=training)}["3 epochs"]
    assert other[0].endswith(f" ({2.5 * hours:,.2f})"), "not 0 GPU seconds saved"


def test_commands_within_a_sentence_are_set_as_code() -> None:
    assert _prose("see `optuna-dsat best <s> --yes` and --tie; a lone ` stays") == (
        'see <code>optuna-dsat best &lt;s&gt; <span class="word">--yes</span></code> and '
        '<span class="word">--tie;</span> a lone ` stays'
    )


def test_why_it_is_the_best_stands_on_the_page(view: StudyView, rendered: str) -> None:
    result = present(explained(view))
    page = Page(rendered)
    assert "why" in page.ids
    assert result.contributions[0].knob in page.text
    assert times_in_words(present(result.contributions[0].factor)) in page.text
    assert f"all together {times_in_words(present(result.speed_up))} measured" in page.text
    assert f"(fitted model): bound by {result.bound}" in page.text


def test_the_step_stands_beside_the_data_sheets(view: StudyView, rendered: str) -> None:
    known = on_a_gpu(view, "NVIDIA H100 80GB HBM3")
    gap = present(prediction_gap(known))
    page = Page(render(known))
    assert gap.verdict in page.text
    for name, seconds in (("forward", gap.measured_phases["forward"]), ("whole step", gap.measured_s)):
        assert f"{name} {metric_in_words('latency', seconds)}" in page.text, name
    assert f"outside these {metric_in_words('latency', gap.measured_phases['other'])}" in page.text
    assert gap.causes
    assert all(cause in page.text for cause in gap.causes)
    assert "of the GPU's peak FLOPS (measured)" in page.text
    assert "Against the data sheet" not in Page(rendered).text, "there is none of the simulated device"


def test_sections_without_content_are_left_out_and_the_end_says_why(view: StudyView, rendered: str) -> None:
    page = Page(rendered)
    assert {item.id for item in sections_of(view)} <= page.ids
    assert "Left out" not in page.text
    page = Page(render(replace(view, trials=())))
    assert "progress" not in page.ids
    assert "#progress" not in page.targets
    assert "Progress of the search: No trial has ended yet" in page.text


def test_a_launchs_config_and_log_are_linked_where_they_are(finished: ReportedStudyBench, tmp_path: Path) -> None:
    view = finished.view()
    odd = next(t for t in view.launched if t.user_attrs[attributes.OUTCOME] == Outcome.SCRIPT_ERROR)
    launch_id = odd.user_attrs[attributes.LAUNCH_ID]
    folder = finished.folder / "out" / "s" / launch_id
    (folder / "ds_config.json").write_text("{}")
    for page in (tmp_path / "out" / "s", tmp_path / "a b" / "c:d"):
        page.mkdir(parents=True, exist_ok=True)
        targets = Page(render(view, links=Links(view=view, page=page))).targets
        files = [target for target in targets if not target.startswith(("#", "data:"))]
        assert files
        assert not [file for file in files if ":" in file.split("/")[0]], "no scheme"
        paths = [Path(os.path.normpath(page / urllib.parse.unquote(file))) for file in files]
        assert all(path.is_file() and path.is_relative_to(tmp_path / "out" / "s") for path in paths)
        assert folder / "ds_config.json" in paths
        assert folder / "logs" / "rank0.stderr.log" in paths
    assert Page(render(view)).targets.count("") == 0


def test_no_link_leads_out_of_the_studys_folder(finished: ReportedStudyBench, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    view = finished.view()
    launch_id = view.launched[0].user_attrs[attributes.LAUNCH_ID]
    link = finished.folder / "out" / "s" / launch_id / "ds_config.json"
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    result = [item.href for item in Links(view=view, page=tmp_path).of([launch_id, "../..", "nowhere"])]
    assert result == [f"out/s/{launch_id}/logs/rank0.stderr.log"]
