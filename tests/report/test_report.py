from __future__ import annotations

import copy
import json
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from optuna_dsat.errors import ScriptFailedError
from optuna_dsat.outcome import Outcome
from optuna_dsat.report import figures
from optuna_dsat.report.facts import next_steps
from optuna_dsat.report.page import figure_section, render, sections_of
from optuna_dsat.report.view import StudyView
from optuna_dsat.study.end_reason import EndReason
from optuna_dsat.trials import attributes
from optuna_dsat.words import times_in_words
from tests.harness import present
from tests.harness.entry_points import leave
from tests.harness.landscapes import Hill
from tests.harness.pages import Page
from tests.harness.reports import ReportedStudyBench
from tests.harness.simulated import SimulatedResult


def missing(view: StudyView) -> dict[str, str]:
    return {section.id: section.missing for section in sections_of(view) if section.missing is not None}


def unfinished(view: StudyView) -> StudyView:
    """Return the study as it stood while its sixth trial was in flight."""
    flying = copy.deepcopy(view.trials[5])
    flying.state, flying.values, flying.datetime_complete = TrialState.RUNNING, None, None
    flying.user_attrs = {name: flying.user_attrs[name] for name in (attributes.CONFIG, attributes.LAUNCH_ID)}
    kept = {key: value for key, value in view.attributes.items() if key == attributes.FINGERPRINT}
    launches = tuple(row for row in view.launches if row.purpose != "confirm" and (row.trial_number or 0) < 5)
    return replace(view, trials=(*view.trials[:5], flying), attributes=kept, launches=launches)


def test_a_report_holds_everything_and_loads_nothing(view: StudyView, rendered: str) -> None:
    text = rendered
    page = Page(text)
    assert page.loads == []
    inside = [target for target in page.targets if target.startswith("#")]
    assert {target[1:] for target in inside} <= page.ids
    (other,) = [target for target in page.targets if target not in inside]
    assert other.startswith("data:application/json;base64,")
    assert "default-src 'none'" in text
    assert len(text.encode()) <= 1_600_000
    winner = present(view.result)
    assert json.dumps(winner.config, indent=2) in "".join(page.words)
    assert "<del>  &#34;train_micro_batch_size_per_gpu&#34;: 2,\n</del>" in text
    assert f"{times_in_words(present(winner.speed_up))}x as fast as your config" in page.text
    assert "16 of 16" in page.text
    assert not missing(view)
    for outcome in {t.user_attrs[attributes.OUTCOME] for t in view.launched}:
        assert outcome.replace("_", " ") in page.text


def test_a_page_of_hundreds_of_trials_stays_small(view: StudyView) -> None:
    """With every digit, and the settings of a trial three times, a page of 200 trials took more than 1.6 MB."""

    def page(count: int) -> int:
        trials, measured = [*view.trials], [trial for trial in view.measured if trial.number]
        for number in range(len(trials), count):
            trial = copy.deepcopy(measured[number % len(measured)])
            trial.number, luck = number, 1 + random.Random(number).random() / 50
            trial.user_attrs[attributes.PEAK_BYTES] = int(luck * trial.user_attrs[attributes.PEAK_BYTES])
            trial.values = [luck * trial.values[0]]
            trials.append(trial)
        return len(render(replace(view, trials=tuple(trials))).encode())

    few = page(20)
    assert few + 480 * (page(80) - few) / 60 < 1_600_000


def test_hover_texts_are_stored_by_their_lines_and_lose_nothing(view: StudyView) -> None:
    drawn = figures.plot_metric(view)
    texts = [text for trace in drawn.data for text in (trace.hovertext if trace.hovertext is not None else ())]
    stored = present(figure_section(id="f", heading="", lead="", figure=drawn).figure)
    kept = [text for trace in stored["data"] for text in trace.get("hovertext", ())]
    assert ["<br>".join(stored["lines"][line] for line in text) for text in kept] == texts
    assert len(set(stored["lines"])) == len(stored["lines"])


def test_a_finalist_that_could_not_be_confirmed_is_told_and_does_not_win(view: StudyView) -> None:
    own = present(view.baseline).trial.number
    ends: dict[str, Any] = dict.fromkeys(("value", "low", "high"))
    ends |= {"outcome": "out_of_memory", "message": "rank 1: out of memory"}
    launches = [launch if launch.number == own else replace(launch, **ends) for launch in view.rounds.launches]
    failed = {launch.number for launch in launches if launch.value is None}
    words = {attributes.CONFIRMATION: replace(view.rounds, launches=tuple(launches)).to_json(), attributes.WINNER: own}
    page = Page(render(replace(view, attributes={**view.attributes, **words})))
    assert "nothing faster than your config was confirmed" in page.text
    assert page.text.count("rank 1: out of memory") == len(failed)


def test_an_empty_study_says_why_there_is_no_figure(bench: ReportedStudyBench) -> None:
    bench.store.create_study("s", bench.spec().model_dump(mode="json"))
    view = bench.view()
    page = Page(render(view))
    assert "Nothing has been launched for this study yet." in page.text
    assert "no best configuration to show" in page.text
    assert len(missing(view)) == len(sections_of(view))
    assert "profile launch has not ended" in missing(view)["memory"]
    assert "optuna-dsat resume s" in page.text
    assert not re.search("<script>[^<]*plotly", render(view)[:200_000])


@pytest.mark.parametrize(
    ("method", "reason", "expected"),
    [
        ("random", EndReason.BUDGET, "--max-trials 32"),
        ("random", EndReason.EARLY_STOPPING, None),
        ("random", EndReason.EXHAUSTED, None),
        ("guided", EndReason.EXHAUSTED, "--min-gain 0"),
    ],
)
def test_a_search_is_continued_by_what_ended_it(
    view: StudyView, method: str, reason: EndReason, expected: str | None
) -> None:
    ended = {**view.attributes, attributes.END_REASON: reason}
    found = dict(next_steps(replace(view, spec=view.spec.model_copy(update={"method": method}), attributes=ended)))
    commands = [command for command in found.values() if " resume " in command]
    assert len(commands) == (expected is not None)
    assert all(command.endswith(expected or "") for command in commands)


def test_a_study_that_is_still_running_shows_what_there_is(view: StudyView) -> None:
    running = unfinished(view)
    page = Page(render(running))
    assert "The search has not ended: 5 of 16 trials done. 1 running is not drawn." in page.text
    assert page.cards["Trials"][0] == "5 of 16"
    assert "Best so far" in page.text
    assert "it has not" in missing(running)["finalists"]
    assert {"micro-batch", "progress"}.isdisjoint(missing(running))


def test_an_interrupted_search_is_not_called_ended(view: StudyView, rendered: str) -> None:
    assert view.end_reason == "--max-trials is reached"
    assert "16 of 16 trials: --max-trials is reached." in Page(rendered).text
    interrupted = replace(view, attributes={**view.attributes, attributes.END_REASON: "interrupted"})
    assert interrupted.end_reason is None
    page = Page(render(interrupted))
    assert "The search has not ended: 16 of 16 trials done." in page.text
    known = {attributes.END_REASON, attributes.WINNER}
    confirming = replace(view, attributes={key: item for key, item in view.attributes.items() if key not in known})
    assert "The search is over after 16 trials; not all finalists are" in Page(render(confirming)).text
    assert "Best so far" in page.text
    assert "Continue the search" in page.text


def test_a_study_with_only_failures_shows_them(bench: ReportedStudyBench) -> None:
    def fail(config: Mapping[str, Any]) -> SimulatedResult | None:
        del config
        return SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=4.0, message="ValueError: <b>no</b>")

    with pytest.raises(ScriptFailedError):
        bench.run(bench.spec(confirm=0), _AfterProfile(fail))
    view = bench.view()
    page = Page(render(view))
    assert "nothing could be measured so far" in page.text
    assert "no best configuration to show" in page.text
    assert "ValueError: <b>no</b>" in page.text
    assert "script error" in page.text
    assert {"progress", "micro-batch"} <= set(missing(view)), "axes of a speed that nothing has"


class _AfterProfile(Hill):
    """A landscape on which everything fails but the profile launch."""

    def __init__(self, fail: Any) -> None:
        super().__init__()
        self._fail = fail

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        first = not self.configs
        result = super().run(ds_config, slots)
        return result if first else self._fail(ds_config)


def test_neither_names_nor_messages_nor_secrets_reach_the_page_unchanged(view: StudyView) -> None:
    script = view.spec.script.model_copy(update={"args": ("--hf-token", "s3cret", "--deepspeed_config", "ds.json")})
    name = "</script><script>alert(1)</script>"
    private = {"comet": {"api_key": "s3cret", "project": name}}
    trials = copy.deepcopy(view.trials)
    for trial in trials:
        trial.user_attrs[attributes.CONFIG].update(private)
    spec = view.spec.model_copy(update={"script": script, "name": "<img src=x>"})
    text = render(replace(view, trials=trials, spec=spec))
    assert "s3cret" not in text
    assert "<img" not in text
    assert "alert(1)</script>" not in text
    assert name in "".join(Page(text).words)


def test_the_command_writes_the_file_and_prints_where(
    finished: ReportedStudyBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave("report", "s", "--storage", finished.url) == 0
    written = Path(capsys.readouterr().out.strip())
    assert written == finished.folder / "out" / "s" / "report.html"
    assert written.read_text().startswith("<!doctype html>")
    other = tmp_path / "other.html"
    assert leave("report", "s", "--storage", finished.url, "-o", str(other)) == 0
    assert other.exists()
    assert not [path for path in other.parent.iterdir() if path.name.startswith(".other")]


def test_what_cannot_be_written_or_is_not_there_is_one_line(
    finished: ReportedStudyBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave("report", "s", "--storage", finished.url, "-o", str(tmp_path / "none" / "r.html")) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert leave("report", "t", "--storage", finished.url) == 2
    assert "no study 't'" in capsys.readouterr().err
    assert leave("report", "s", "--storage", finished.url, "--epochs", "inf") == 2
    assert "must be a finite number" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert leave("report", "s", "--storage", finished.url) == 2
    assert capsys.readouterr().err == "optuna-dsat: plotly is not installed: pip install 'plotly>=6'\n"
