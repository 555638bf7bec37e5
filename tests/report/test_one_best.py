"""One best: whoever shows a study shows the same trial, the same metric and the same speed-up."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from wsgiref.util import setup_testing_defaults

import pytest

from optuna_dsat.cli.show import show_result
from optuna_dsat.config import ds_config
from optuna_dsat.display.lines import lines_of
from optuna_dsat.report import figures
from optuna_dsat.report.dashboard.live_app import ResultStorage
from optuna_dsat.report.dashboard.notes import study_note, trial_note
from optuna_dsat.report.page import render
from optuna_dsat.report.view import StudyView
from optuna_dsat.study.confirm.verdict import Verdict, VerdictKind
from optuna_dsat.study.confirm.words import verdict_in_words
from optuna_dsat.study.progress import SearchStarted
from optuna_dsat.study.result import StudyResult
from optuna_dsat.trials import attributes
from optuna_dsat.words import metric_in_words
from tests.harness import present
from tests.harness.entry_points import leave
from tests.harness.landscapes import Hill
from tests.harness.reports import ReportedStudyBench
from tests.harness.simulated import SimulatedLauncher, SimulatedResult
from tests.harness.studies import USER_CONFIG

CONFIRMED_STAR = figures.BEST + figures.CONFIRMED


class Shown(NamedTuple):
    """What one view shows."""

    trial: int
    value: float
    speed_up: float | None


class Changing(Hill):
    """A model whose launches differ from what the first launch of a configuration measured.

    Args:
        lucky: Place of the configuration, in order of first launch, whose first launch takes half its time, and whose
            others take three times that.
        again: Factor on the step time of further launches of all configurations but the user's.
    """

    def __init__(self, *, lucky: int = -1, again: float = 1.0) -> None:
        super().__init__()
        self._lucky = lucky
        self._again = again
        self._seen: dict[str, int] = {}

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        result = super().run(ds_config, slots)
        key = json.dumps(ds_config, sort_keys=True)
        first = key not in self._seen
        place = self._seen.setdefault(key, len(self._seen))
        own = ds_config["train_micro_batch_size_per_gpu"] == USER_CONFIG["train_micro_batch_size_per_gpu"]
        factor = self._again if not first and not own else 1.0
        if place == self._lucky:
            factor = 0.5 if first else 3.0
        times = {name: getattr(result, name) * factor for name in ("forward_s", "backward_s", "step_s")}
        return replace(result, **times)


def command(bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert leave(*args, "--storage", bench.url) == 0
    return capsys.readouterr().out


def of_rows(rows: list[dict[str, Any]]) -> Shown:
    """Return the row that is marked as the best: its confirmed metric, or that of the search if it has none."""
    (best,) = [row for row in rows if str(row["handed_over"]) == "True"]
    confirmed = best["confirmed_value"] not in (None, "")
    value = best["confirmed_value"] if confirmed else best["value"]
    return Shown(int(best["number"]), float(value), float(best["speed_up"]) if confirmed else None)


def of_commands(bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, Shown]]:
    (listed,) = json.loads(command(bench, capsys, "studies", "--json"))
    yield "studies", Shown(listed["best_trial"], listed["best"], listed["speed_up"])
    state = json.loads(command(bench, capsys, "show", "s", "--json"))
    ratio = state["verdict"]["speed_up"]["value"]
    yield "show", Shown(state["verdict"]["handed_over"], state["verdict"]["value"], ratio)
    yield "show, best", of_rows([state["best"]])
    yield "trials", of_rows(json.loads(command(bench, capsys, "trials", "s", "--json")))
    exported = json.loads(command(bench, capsys, "export", "s"))
    yield "export", of_rows(exported["trials"])
    yield (
        "export, verdict",
        Shown(
            exported["verdict"]["handed_over"], exported["verdict"]["value"], exported["verdict"]["speed_up"]["value"]
        ),
    )
    table = list(csv.DictReader(io.StringIO(command(bench, capsys, "export", "s", "--format", "csv"))))
    yield "export, csv", of_rows(table)
    words = json.loads(command(bench, capsys, "explain", "s", "--json"))
    yield "explain", Shown(words["winner"], words["value"], words["speed_up"])


def of_files(bench: ReportedStudyBench) -> Shown:
    metrics = json.loads((bench.folder / "out" / "s" / "best_ds_metrics.json").read_text())
    return Shown(metrics["trial"], metrics["value"], metrics["speed_up"])


def metrics_of(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str], result: StudyResult | None
) -> dict[str, dict[str, Any]]:
    """Return the metrics of the result and of the user's config, by view."""
    asked = {"show": ("show", "s", "--json"), "export": ("export", "s")}
    matches = {name: json.loads(command(bench, capsys, *args))["verdict"] for name, args in asked.items()}
    if result is not None:
        written = json.loads((bench.folder / "out" / "s" / "best_ds_metrics.json").read_text())
        matches |= {"file": written["verdict"], "Python": result.to_json()["verdict"]}
        assert written["metrics"] == written["verdict"]["metrics"]
        assert result.metrics == result.to_json()["verdict"]["metrics"]
    return matches


def of_report(view: StudyView) -> Iterator[tuple[str, Shown]]:
    result, verdict = view.result, view.verdict
    assert result is not None
    assert verdict is not None
    number = result.trial
    yield "report", Shown(number, result.value, result.speed_up)
    drawn = {trace.name: trace for plot in (figures.plot_metric, figures.plot_progress) for trace in plot(view).data}
    confirmed = verdict.is_by_rounds
    star = drawn[CONFIRMED_STAR if confirmed else figures.BEST]
    yield "star", Shown(int(re.findall(r"trial (\d+)", star.hovertext[0])[0]), star.y[0], result.speed_up)
    assert (CONFIRMED_STAR in drawn) == confirmed
    assert "best so far in the search" in drawn
    metric = figures.plot_metric(view)
    (star,) = [trace for trace in metric.data if trace.name.startswith(figures.BEST)]
    (cross,) = [trace for trace in metric.data if trace.name.startswith(figures.USER)]
    yield "plot_metric", Shown(number, star.y[0], result.speed_up)
    assert cross.y[0] == pytest.approx(present(verdict.baseline).value)
    if confirmed:
        (points,) = [item for item in figures.plot_finalists(view).data if item.name.startswith("in rounds")]
        (at,) = [place for place, symbol in enumerate(points.marker.symbol) if symbol == "star"]
        yield "finalists", Shown(number, points.x[at], result.speed_up)


def of_dashboard(bench: ReportedStudyBench, view: StudyView) -> Iterator[tuple[str, int]]:
    """Yield the trial in the card of the best one, asked of optuna-dashboard itself, and that of the notes."""
    dashboard = pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    storage = ResultStorage(bench.store)
    study_id = storage.get_study_id_from_name("s")
    environ: dict[str, Any] = {"PATH_INFO": f"/api/studies/{study_id}"}
    setup_testing_defaults(environ)
    answer = json.loads(b"".join(dashboard.wsgi(storage)(environ, lambda *_: None)))
    (card,) = answer["best_trials"]
    yield "card", card["number"]
    (row,) = re.findall(r"\| best \| (\d+) ", study_note(view))
    yield "note", int(row)
    (named,) = [item.number for item in view.launched if "The best of this study" in trial_note(view, item)]
    yield "note of the trial", named


def agree(bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str], *, result: StudyResult | None) -> Verdict:
    """Read every view of the study, compare them with the verdict, and return it; ``result`` once it is concluded."""
    view = bench.view()
    verdict = present(view.verdict)
    expected = Shown(verdict.result.number, verdict.result.value, present(verdict.speed_up).value)
    matches = dict([*of_commands(bench, capsys), *of_report(view)])
    if result is not None:
        matches["Python"] = Shown(result.trial, result.value, result.speed_up)
        matches["Python, rows"] = of_rows(result.trials(bench.url))
        matches["file"] = of_files(bench)
        show_result(result, as_json=False)
        printed = capsys.readouterr().out
        assert all(line in printed for line in verdict_in_words(verdict, metric="throughput"))
    for name, metrics in metrics_of(bench, capsys, result).items():
        assert metrics["metrics"] == pytest.approx(dict(verdict.result.metrics)), name
        assert metrics["metrics"]["throughput"] == pytest.approx(expected.value), name
        assert metrics["user_metrics"] == pytest.approx(dict(present(verdict.baseline).metrics)), name
        assert metrics["user_metrics"]["throughput"] == pytest.approx(present(verdict.baseline).value), name
    for name, shown in matches.items():
        assert shown.trial == expected.trial, name
        assert shown.value == pytest.approx(expected.value), name
        assert shown.speed_up is None or shown.speed_up == pytest.approx(expected.speed_up), name
    for name, number in of_dashboard(bench, view):
        assert number == expected.trial, name
    same_words(bench, capsys, view, verdict)
    return verdict


def same_words(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str], view: StudyView, verdict: Verdict
) -> None:
    """Compare the sentences and the config that the views show."""
    lines = verdict_in_words(verdict, metric=view.metric)
    value = metric_in_words(view.metric, verdict.result.value)
    shown = command(bench, capsys, "show", "s")
    assert f"Best: trial {verdict.result.number}, " in shown
    assert all(line in shown for line in lines)
    page, note = render(view), study_note(view)
    assert all(line.replace("'", "&#39;") in page for line in lines)
    assert all(line in note for line in lines)
    listed = command(bench, capsys, "trials", "s").splitlines()
    rows = [line for line in listed if re.search("\u2502 yes +\u2502", line)]
    assert len(rows) == 1, rows
    row = rows[0]
    assert row.split()[0] == str(verdict.result.number)
    assert f" {value.removesuffix(' samples/s')} " in row
    speeds = {int(cells[0]): cells for cells in (re.split(" *\u2502 *", line) for line in listed) if cells[0].isdigit()}
    baseline = float(speeds[0][3])
    for number in (each.number for each in view.measured if verdict.in_rounds(each.number) is None):  # 5.18, then 3.44
        assert float(speeds[number][4]) == pytest.approx(float(speeds[number][3]) / baseline, rel=0.01)
    assert value in command(bench, capsys, "studies")
    assert f"The result is trial {verdict.result.number}, {value}, " in command(bench, capsys, "explain", "s")
    best = json.loads(command(bench, capsys, "best", "s"))
    trial = view.trials[verdict.result.number]
    assert best[ds_config.MICRO_BATCH] == trial.params["train_micro_batch_size_per_gpu"]
    assert best == view.ready_config(trial)


def exported(bench: ReportedStudyBench) -> Any:
    return json.loads(Path(bench.folder, "out", "s", "best_ds_config.json").read_text())


def test_all_views_show_the_confirmed_winner_though_the_search_measured_another_best(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench.run(bench.spec(max_trials=6, confirm=3), Changing(lucky=4), noise=0.01)
    verdict = agree(bench, capsys, result=result)
    assert verdict.kind is VerdictKind.WINNER
    view = bench.view()
    lucky = view.measured[0]
    assert verdict.result.number != lucky.number, "the search was misled"
    assert verdict.result.value < lucky.values[0]
    assert f"in the search {metric_in_words('throughput', lucky.values[0])}" in trial_note(view, lucky)
    assert "only the rounds count" in render(view) or not verdict.warnings
    assert bench.study().user_attrs[attributes.RESULT] == " ".join(verdict_in_words(verdict, metric="throughput"))
    assert exported(bench) == result.config == view.ready_config(view.trials[verdict.result.number])


def test_all_views_show_the_users_own_config_where_nothing_is_surely_better(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench.run(bench.spec(max_trials=5, confirm=2), Changing(again=8.0), noise=0.01)
    verdict = agree(bench, capsys, result=result)
    assert verdict.kind is VerdictKind.BASELINE_IS_BEST
    assert verdict.is_baseline
    assert bench.view().measured[0].number != verdict.result.number, "the search measured another best"
    assert "Nothing was confirmed to be faster than your config" in render(bench.view())
    assert "It is your config" in command(bench, capsys, "explain", "s")
    assert exported(bench)[ds_config.MICRO_BATCH] == USER_CONFIG["train_micro_batch_size_per_gpu"]


def test_without_a_confirmation_all_views_show_the_best_of_the_search_as_such(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench.run(bench.spec(max_trials=5, confirm=0), Changing(), noise=0.01)
    verdict = agree(bench, capsys, result=result)
    assert verdict.kind is VerdictKind.UNCONFIRMED
    assert verdict.result.number == bench.study().best_trial.number
    unsure = "by the few steps of the search, not confirmed"
    for text in (command(bench, capsys, "show", "s"), command(bench, capsys, "explain", "s"), render(bench.view())):
        assert unsure in text
    assert "the search" in command(bench, capsys, "studies")


def test_trials_of_the_search_are_compared_with_your_config_as_it_is_shown(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was: 1,023 samples/s 9.26 times as fast as 166.3, next to the best with 1,047, 6.30 times as fast."""
    bench.run(bench.spec(max_trials=5, confirm=1), Changing(lucky=1), noise=0.01)
    verdict = agree(bench, capsys, result=None)
    baseline = present(verdict.baseline)
    assert baseline.searched_value > 2 * baseline.value


def test_a_resumed_study_begins_with_what_was_confirmed_and_ends_with_what_is(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Changing(lucky=2)
    first = bench.run(bench.spec(max_trials=4, confirm=2), model, noise=0.01)
    before = present(bench.view().verdict)
    assert before.result.number == first.trial
    assert before.result.value == pytest.approx(first.value)
    bench.news.clear()
    spec = bench.spec(max_trials=7, confirm=2)
    bench.session(spec, SimulatedLauncher(model, total_slots=2, noise=0.01), conclude=False).run()
    (started,) = [event for event in bench.news if isinstance(event, SearchStarted)]
    assert started.confirmed is not None
    assert (started.confirmed.number, started.confirmed.speed.value) == (before.result.number, before.result.value)
    lines = lines_of(started)
    assert lines[1].startswith(f"Best in the search so far: trial {present(started.best).number}, ")
    assert lines[2].startswith(f"Confirmed so far: trial {before.result.number}, ")
    assert agree(bench, capsys, result=None).result.number == before.result.number, "until rounds say otherwise"
    result = bench.run(spec, model, noise=0.01)
    after = present(bench.view().verdict)
    assert after.result.number == result.trial
    assert after.rounds >= before.rounds


def test_what_deepspeed_does_not_tell_apart_is_no_difference_from_the_users_config(bench: ReportedStudyBench) -> None:
    idle = {"allgather_partitions": True, "allgather_bucket_size": 50_000_000, "contiguous_gradients": True}
    config = {**USER_CONFIG, "zero_optimization": {"stage": 2, "overlap_comm": True, **idle}}
    bench.run(bench.spec(ds_config=config, zero_stages=(1,), max_trials=4, confirm=0), Hill())
    result = present(bench.view().result)
    assert not result.verdict.is_baseline
    changed = {change.key.rpartition(".")[2] for change in result.changes}
    assert "stage" in changed
    assert not changed & idle.keys()
    assert idle.items() <= result.config["zero_optimization"].items()


def test_a_duration_of_the_rounds_has_its_samples_in_the_table_of_trials_as_in_the_result(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench.run(bench.spec(max_trials=3, metric="step", confirm=1), Hill(), noise=0.02)
    assert result.verdict.is_by_rounds
    value = result.verdict.result.speed(metric="step", device="cuda").brief
    assert "samples/s" in value
    assert f" {value} " in command(bench, capsys, "trials", "s")
