from __future__ import annotations

import json
from typing import Any

import pytest

from optuna_dsat import history, lineage, memory
from optuna_dsat.report.figures import BEST, EDGE, PREDICTED_AS_MEASURED, USER, memory_figure, metric_figure
from optuna_dsat.report.view import StudyView
from optuna_dsat.study_space import hardware_of

GIB = 2**30


def by_name(figure: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for trace in figure.data:
        found.setdefault(trace.name, []).append(trace)
    return found


def test_one_line_per_lineage_with_its_out_of_memory_edge(view: StudyView) -> None:
    trials = view.trials
    figure = metric_figure(trials, metric="throughput")
    lineages = lineage.group(trials).values()
    measured = [one for one in lineages if any(lineage.score(t) is not None for t in one.trials)]
    assert len([trace for trace in figure.data if trace.name not in (EDGE, USER, BEST)]) == len(measured) > 1
    (edge,) = by_name(figure)[EDGE]
    drawn = {x for x, text in zip(edge.x, edge.hovertext, strict=True) if "out of memory at" in text}
    assert drawn == {one.smallest_too_large for one in lineages if one.smallest_too_large is not None}
    assert drawn


def test_best_and_the_users_config_are_marked(view: StudyView) -> None:
    assert view.best is not None
    traces = by_name(metric_figure(view.trials, metric="throughput", winner=view.best.trial.number))
    (best,), (user,) = traces[BEST], traces[USER]
    assert list(best.x) == [view.best.trial.params["train_micro_batch_size_per_gpu"]]
    assert f"trial {view.best.trial.number}" in best.hovertext[0]
    assert list(user.x) == [2]
    assert "ZeRO 2, micro-batch 2" in user.hovertext[0]


def test_axes_name_their_units_and_times_are_shown_in_ms(view: StudyView) -> None:
    trials = view.trials
    throughput = metric_figure(trials, metric="throughput")
    assert "samples/s" in throughput.layout.yaxis.title.text
    assert "samples per GPU" in throughput.layout.xaxis.title.text
    assert 2 in throughput.layout.xaxis.tickvals
    as_times = metric_figure(trials, metric="latency")
    assert "(ms)" in as_times.layout.yaxis.title.text
    assert max(y for y in as_times.data[0].y) == pytest.approx(1000 * max(y for y in throughput.data[0].y))


def test_every_point_of_the_memory_figure_is_the_models_estimate_and_the_measured_peak(view: StudyView) -> None:
    assert view.profiled is not None
    figure = memory_figure(view.trials, spec=view.spec, profiled=view.profiled)
    hardware = hardware_of(view.spec, view.profiled)
    expected = {
        (
            memory.estimate(view.profiled.profile, config, micro_batch=size, hardware=hardware).device_bytes / GIB,
            peak / GIB,
        )
        for config, size, peak in history.measured_peaks(view.trials)
    }
    drawn = {
        (x, y)
        for trace in figure.data
        if trace.name != PREDICTED_AS_MEASURED
        for x, y in zip(trace.x, trace.y, strict=True)
    }
    assert drawn == expected
    assert len(by_name(figure)[PREDICTED_AS_MEASURED]) == 1
    assert "predicted" in figure.data[0].hovertext[0]
    assert "(GiB)" in figure.layout.xaxis.title.text


def test_an_empty_history_says_so(view: StudyView) -> None:
    assert view.profiled is not None
    for figure in (
        metric_figure([], metric="throughput"),
        memory_figure([], spec=view.spec, profiled=view.profiled),
    ):
        assert not figure.data
        assert figure.layout.annotations[0].text == "Nothing has been measured yet."
        assert json.loads(figure.to_json())["layout"]["yaxis"]["title"]["text"]
