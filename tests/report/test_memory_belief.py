"""What is shown as believed is what the search had to go by: never a launch's own peak, nor the formulas alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.launch.simulated import SimulatedResult
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.figures import memory_figure, note_of
from optuna_dsat.report.memory_belief import MemoryBelief
from optuna_dsat.report.memory_table import memory_table
from optuna_dsat.report.notes import trial_note
from optuna_dsat.report.view import StudyView
from optuna_dsat.report.why import why_of
from optuna_dsat.store import Store
from optuna_dsat.study import methods
from optuna_dsat.study.methods import make_planner
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, visible_params
from optuna_dsat.words import bytes_in_words
from tests.harness.landscapes import GIB, Hill
from tests.harness.reports import ReportedStudyBench


def hungry(config: Mapping[str, Any]) -> SimulatedResult | None:
    """Every launch takes 12 GiB more than the formulas know of."""
    size = config["train_micro_batch_size_per_gpu"]
    found = Hill().run(config, 2)
    return found if size > 28 else replace(found, peak_bytes=found.peak_bytes + 12 * GIB)


def searched(folder: Path, method: str) -> StudyView:
    (folder / "train.py").write_text("")
    with Store.open(f"sqlite:///{folder / 'study.db'}") as store:
        bench = ReportedStudyBench(folder, store)
        bench.run(bench.spec(method=method, max_trials=8, confirm=0), Hill(override=hungry))
        return bench.view()


@pytest.fixture(scope="module")
def guided_view(tmp_path_factory: pytest.TempPathFactory) -> StudyView:
    return searched(tmp_path_factory.mktemp("guided"), "guided")


@pytest.fixture(scope="module")
def random_view(tmp_path_factory: pytest.TempPathFactory) -> StudyView:
    return searched(tmp_path_factory.mktemp("random"), "random")


@pytest.fixture(params=["guided_view", "random_view"])
def hungry_view(request: pytest.FixtureRequest) -> StudyView:
    found: StudyView = request.getfixturevalue(request.param)
    return found


def belief_of(view: StudyView) -> MemoryBelief:
    assert view.memory is not None
    return view.memory


def test_beliefs_follow_the_launches_where_the_formulas_are_wrong(hungry_view: StudyView) -> None:
    peaks = belief_of(hungry_view).peaks
    measured = {
        trial.number: trial.user_attrs[attributes.PEAK_BYTES]
        for trial in hungry_view.trials
        if trial.user_attrs.get(attributes.PEAK_BYTES, 0) > 0
    }
    assert not peaks[min(measured)].corrected, "nothing was known before the first launch"
    assert peaks[min(measured)].believed_bytes == peaks[min(measured)].formula_bytes
    later = [number for number in measured if peaks[number].corrected]
    assert len(later) >= 4
    believed, alone = (
        statistics.median(abs(getattr(peaks[number], name) / measured[number] - 1) for number in later)
        for name in ("believed_bytes", "formula_bytes")
    )
    assert believed < 0.5 * alone
    assert "of the formulas alone within" in note_of(memory_figure(hungry_view))
    rows = memory_table(hungry_view)
    assert all(row.device_bytes > row.formula_bytes for row in rows if row.ran is not None)
    note = trial_note(hungry_view, hungry_view.trials[later[-1]])
    assert bytes_in_words(peaks[later[-1]].believed_bytes) in note
    assert bytes_in_words(peaks[later[-1]].formula_bytes) in note


def test_no_launch_is_judged_by_itself_but_the_next_ones_are(hungry_view: StudyView) -> None:
    before = belief_of(hungry_view).peaks
    first = min(t.number for t in hungry_view.trials if t.user_attrs.get(attributes.PEAK_BYTES, 0) > 0)
    trials = [copy(trial) for trial in hungry_view.trials]
    trials[first].user_attrs = {**trials[first].user_attrs, attributes.PEAK_BYTES: 50 * GIB}
    after = belief_of(replace(hungry_view, trials=tuple(trials))).peaks
    assert after[first] == before[first]
    assert after.keys() == before.keys()
    assert any(after[number].believed_bytes != before[number].believed_bytes for number in after)


def test_a_guided_searchs_beliefs_are_its_planners(guided_view: StudyView) -> None:
    view = guided_view
    assert view.profiled is not None
    planner = make_planner(view.spec, view.profiled, view.space)
    checked = 0
    for number, peak in belief_of(view).peaks.items():
        begun = view.trials[number].datetime_start
        assert begun is not None
        history = [t for t in view.trials if t.datetime_complete is not None and t.datetime_complete <= begun]
        params = visible_params(view.trials[number])
        size = params.pop(MICRO_BATCH)
        (expected,) = planner.predict(history, [(params, size)])
        if peak.corrected and expected is not None:
            assert peak.believed_bytes == pytest.approx(expected.peak_bytes, abs=1)
            checked += 1
    assert checked >= 4
    largest = {row.words: row.largest for row in memory_table(view)}
    ran = {row.words: row.ran for row in memory_table(view) if row.ran is not None}
    assert all(largest[words] >= 1 for words in ran)


def test_what_launches_showed_bounds_what_is_believed_to_fit(guided_view: StudyView) -> None:
    trials = [copy(trial) for trial in guided_view.trials]
    for trial in trials:
        trial.state, trial.values = TrialState.PRUNED, None
        trial.user_attrs = {**trial.user_attrs, attributes.OUTCOME: Outcome.OUT_OF_MEMORY.value}
    rows = memory_table(replace(guided_view, trials=tuple(trials)))
    refused = {row.words: row for row in rows if row.too_large is not None}
    assert refused
    assert all(row.largest < row.too_large for row in refused.values() if row.too_large is not None)
    assert all(row.largest >= row.ran for row in memory_table(guided_view) if row.ran is not None)


def test_a_report_makes_the_table_of_all_lineages_once(guided_view: StudyView, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StudySpec] = []

    def count(spec: StudySpec, *arguments: Any, **given: Any) -> GuidedPlanner:
        made.append(spec)
        return make_planner(spec, *arguments, **given)

    monkeypatch.setattr(methods, "make_planner", count)
    view = replace(guided_view)
    assert why_of(view) is not None
    assert belief_of(view).peaks
    assert memory_table(view)
    assert len(made) == 1


def test_before_the_profile_nothing_is_believed(bench: ReportedStudyBench) -> None:
    bench.store.create_study("s", bench.spec().model_dump(mode="json"))
    view = bench.view()
    assert view.memory is None
    assert memory_table(view) == ()
