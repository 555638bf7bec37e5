from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial

from optuna_dsat.cost import memory
from optuna_dsat.errors import UsageError
from optuna_dsat.outcome import Outcome
from optuna_dsat.report import figures
from optuna_dsat.report.cards import search_seconds
from optuna_dsat.report.dashboard.notes import trial_note
from optuna_dsat.report.facts import slot_seconds
from optuna_dsat.report.figures import (
    BEST,
    CONFIRMED,
    EDGE,
    PREDICTED_AS_MEASURED,
    USER,
    History,
    metric_figure,
    missing,
    note_of,
)
from optuna_dsat.report.figures._metric import MEMORY_EDGE, curves_of
from optuna_dsat.report.page import render
from optuna_dsat.report.view import StudyView
from optuna_dsat.study.space import hardware_of
from optuna_dsat.trials import attributes, lineage
from optuna_dsat.words import bytes_in_words, count_in_words
from tests.harness.landscapes import GIB, Hill
from tests.harness.pages import Page
from tests.harness.reports import ReportedStudyBench
from tests.harness.simulated import SimulatedResult


def history(trials: tuple[FrozenTrial, ...], metric: str = "throughput", device: str = "") -> History:
    return History(trials=trials, metric=metric, maximize=metric != "latency", verdict=None, device=device)


def by_name(figure: Any) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {}
    for trace in figure.data:
        result.setdefault(trace.name, []).append(trace)
    return result


def test_one_line_per_lineage_with_its_out_of_memory_edge(view: StudyView) -> None:
    trials = view.trials
    figure = metric_figure(history(trials))
    lineages = lineage.group(trials).values()
    measured = [item for item in lineages if any(lineage.score(t) is not None for t in item.trials)]
    assert len([trace for trace in figure.data if trace.name not in (EDGE, USER, BEST)]) == len(measured) > 1
    (edge,) = by_name(figure)[EDGE]
    drawn = {x for x, text in zip(edge.x, edge.hovertext, strict=True) if "out of memory at" in text}
    assert drawn == {item.smallest_too_large for item in lineages if item.smallest_too_large is not None}
    assert drawn


def test_the_posterior_is_drawn_as_curves_with_their_bands_up_to_the_memory_edge(view: StudyView) -> None:
    curves, planner = curves_of(view), view.planner
    assert planner is not None
    assert len(curves) == len({curve.words for curve in curves}) > 1
    lineages = lineage.group(view.trials)
    for curve in curves:
        own = lineages[curve.lineage]
        expected = planner.predict(view.trials, [(own.params, size) for size in curve.sizes])
        assert curve.values == pytest.approx([0 if item is None else item.value for item in expected], rel=1e-4)
        assert all(low < value < high for low, value, high in zip(curve.low, curve.values, curve.high, strict=True))
        assert (own.largest_fit or 0) <= (curve.edge or curve.sizes[-1]) < (own.smallest_too_large or math.inf)
    traces = by_name(figures.plot_metric(view))
    assert {curve.edge for curve in curves} - {None} == set(traces[MEMORY_EDGE][0].x) - {None} != set()
    assert view.best is not None
    markers = [trace for trace in traces[curves[0].words] if trace.mode == "markers"]
    filled = [trace for trace in markers if "open" not in trace.marker.symbol]
    assert view.best.trial.params[lineage.MICRO_BATCH] in {x for trace in filled for x in trace.x}
    assert not curves_of(replace(view, profiled=None))


def test_best_and_the_users_config_are_marked(view: StudyView) -> None:
    assert view.best is not None
    traces = by_name(figures.plot_metric(view))
    (best,), (user,) = traces[f"{BEST}{CONFIRMED}"], traces[f"{USER}{CONFIRMED}"]
    assert list(best.x) == [view.best.trial.params["train_micro_batch_size_per_gpu"]]
    assert f"trial {view.best.trial.number}" in best.hovertext[0]
    assert list(user.x) == [2]
    assert "ZeRO 2, micro-batch 2" in user.hovertext[0]


def test_axes_name_their_units_and_times_are_shown_in_ms(view: StudyView) -> None:
    trials = view.trials
    throughput = metric_figure(history(trials))
    assert "samples/s" in throughput.layout.yaxis.title.text
    assert "samples per rank" in throughput.layout.xaxis.title.text
    assert 2 in throughput.layout.xaxis.tickvals
    as_times = metric_figure(history(trials, "latency"))
    assert "(ms)" in as_times.layout.yaxis.title.text
    assert max(y for y in as_times.data[0].y) == pytest.approx(1000 * max(y for y in throughput.data[0].y))


def test_figure_and_page_have_the_peaks_and_speeds_that_were_predicted_at_proposal(bench: ReportedStudyBench) -> None:
    """Every launch takes 12 GiB more than the formulas know of: predictions follow the launches before each trial."""

    def hungry(config: Mapping[str, Any]) -> SimulatedResult | None:
        result = Hill().run(config, 2)
        large = config["train_micro_batch_size_per_gpu"] > 28
        return result if large else replace(result, peak_bytes=result.peak_bytes + 12 * GIB)

    bench.run(bench.spec(method="guided", max_trials=8, confirm=0), Hill(override=hungry))
    view = bench.view()
    assert view.profiled is not None
    profile, hardware = view.profiled.profile, hardware_of(view.spec, view.profiled)
    peaks, formulas = {}, {}
    for trial in view.trials:
        attrs = trial.user_attrs
        if attrs.get(attributes.PEAK_BYTES, 0) > 0:
            size = attrs[attributes.CONFIG]["train_micro_batch_size_per_gpu"]
            peaks[trial.number] = attrs[attributes.PREDICTED_PEAK_BYTES], attrs[attributes.PEAK_BYTES]
            formulas[trial.number] = memory.estimate(
                profile, attrs[attributes.CONFIG], micro_batch=size, hardware=hardware
            ).device_bytes
    first, *later = sorted(peaks)
    assert peaks[first][0] == pytest.approx(formulas[first], abs=1), "nothing was known before the first launch"
    assert len(later) >= 4
    predicted, alone = (
        statistics.median(abs(bytes_of(number) / peaks[number][1] - 1) for number in later)
        for bytes_of in (lambda number: peaks[number][0], lambda number: formulas[number])
    )
    assert predicted < 0.5 * alone
    figure = figures.plot_memory(view)
    (line,) = by_name(figure)[PREDICTED_AS_MEASURED]
    drawn = {(x, y) for trace in figure.data if trace is not line for x, y in zip(trace.x, trace.y, strict=True)}
    assert drawn == {(predicted / GIB, measured / GIB) for predicted, measured in peaks.values()}
    assert f"half of the {len(peaks)} predictions were within" in note_of(figure)
    assert bytes_in_words(peaks[later[-1]][0]) in trial_note(view, view.trials[later[-1]])
    text = Page(render(view)).text
    assert "samples/s predicted" in text
    for trial in view.measured:
        if speed := trial.user_attrs.get(attributes.PREDICTED_VALUE):
            assert f" {count_in_words(speed)} {count_in_words(trial.values[0])} " in text, trial.number


def test_an_empty_history_says_so(view: StudyView) -> None:
    for figure, why in (
        (metric_figure(history(())), "Nothing has been measured yet."),
        (figures.plot_memory(replace(view, trials=())), "No trial has both a predicted and a measured peak."),
    ):
        assert not figure.data
        assert figure.layout.annotations[0].text == why
        assert json.loads(figure.to_json())["layout"]["yaxis"]["title"]["text"]


PLOTS = [name for name in figures.__all__ if name.startswith("plot_")]


@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_takes_a_view_and_an_optuna_study_alike(view: StudyView, name: str) -> None:
    plot = getattr(figures, name)
    study = optuna.load_study(study_name="s", storage=view.storage_url)
    of_view, of_study = plot(view), plot(study)
    assert of_study.to_json() == of_view.to_json()
    assert of_view.layout.title.text
    assert bool(of_view.data) == (missing(of_view) is None)
    assert plot.__doc__


def test_plots_of_trials_take_a_study_that_optuna_dsat_did_not_make() -> None:
    study = optuna.create_study(direction="minimize")
    for number in range(12):
        trial = study.ask()
        size = trial.suggest_int("train_micro_batch_size_per_gpu", 1, 64)
        stage = trial.suggest_categorical("zero_stage", [1, 3])
        state = optuna.trial.TrialState.PRUNED if size > 60 else None
        study.tell(trial, None if size > 60 else 100.0 / size + stage + number % 2, state=state)
    for name in ("plot_metric", "plot_progress"):
        assert getattr(figures, name)(study).data
    with pytest.raises(UsageError, match="not made by optuna-dsat"):
        figures.plot_memory(study)


def test_the_night_between_two_sessions_is_no_time_of_the_search(view: StudyView) -> None:
    launches, half = view.launches, len(view.launches) // 2
    spent = search_seconds(launches)
    assert slot_seconds(launches) <= 4 * spent
    end = 8 * 3600 + max(row.report.started_at + row.report.held_s for row in launches)
    late = (replace(row.report, started_at=row.report.started_at + end) for row in launches[half:])
    night = (replace(row, report=report) for row, report in zip(launches[half:], late, strict=True))
    assert search_seconds([*launches[:half], *night]) == pytest.approx(spent, abs=600)
    assert search_seconds([]) == 0


def test_progress_never_falls_and_ends_at_the_best(view: StudyView) -> None:
    (best,) = by_name(figures.plot_progress(view))["best so far in the search"]
    assert list(best.y) == sorted(best.y)
    assert best.y[-1] == attributes.best_trials(view.trials, maximize=True)[0].values[0]


def test_finalists_are_shown_with_their_intervals_best_first(view: StudyView) -> None:
    figure = figures.plot_finalists(view)
    confirmed = by_name(figure)["in rounds, with its 95% interval"][0]
    values = [row["value"] for row in view.rounds.finalists() if row["outcome"] == Outcome.MEASURED]
    assert list(confirmed.x) == sorted((value for value in values if value is not None), reverse=True)
    assert view.best is not None
    starred = [x for x, symbol in zip(confirmed.x, confirmed.marker.symbol, strict=True) if symbol == "star"]
    assert starred == [view.best.value]
    assert min(confirmed.error_x.array) >= 0
    assert "your config" in figure.layout.yaxis.ticktext[-1]
