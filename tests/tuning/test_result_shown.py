"""What a result shows of itself: in a line, a notebook, rows and figures, and where it is no faster config."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import plotly.graph_objects as go
import pytest

import optuna_dsat
from optuna_dsat.errors import UsageError
from optuna_dsat.study.options.parse import share
from optuna_dsat.words import slot_name
from tests.harness.entry_points import EntryPointBench, Run, bench, run_here, searching_in

__all__ = ["bench", "run_here"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> optuna_dsat.TuneResult:
    options: dict[str, Any] = {"metric": "throughput", "cpu_ranks": 2, "max_trials": 4, "confirm": 1, "quiet": True}
    with pytest.MonkeyPatch.context() as patch, searching_in(tmp_path_factory.mktemp("tuned"), patch):
        return optuna_dsat.tune("train.py", "ds.json", method="random", **options)


class Text(HTMLParser):
    """The text of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags = "", set[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_result_is_one_short_line(result: optuna_dsat.TuneResult) -> None:
    shown = repr(result)
    assert "\n" not in shown
    assert len(shown) < 300 + len(result.config_path)
    assert shown.startswith("TuneResult('train-random': trial ")
    assert re.search(r"ZeRO \d.*samples/s.*x as fast as your config", shown)
    assert result.config_path in shown


def test_ones_own_config_is_no_multiple_of_itself(result: optuna_dsat.TuneResult) -> None:
    assert result.verdict.baseline is not None
    own = replace(result, verdict=replace(result.verdict, result=result.verdict.baseline))
    assert ", your config, config_path=" in repr(own)
    assert "times" not in repr(own)


def test_a_notebook_shows_a_table_whose_texts_stand_for_themselves(result: optuna_dsat.TuneResult) -> None:
    page = Text(result._repr_html_())
    assert page.tags <= {"div", "p", "b", "table", "tr", "th", "td"}
    for words in (result.study, "samples/s", result.config_path, result.command, f"trial {result.trial} "):
        assert words in page.text
    foreign = replace(result, study="<script>alert(1)</script>", command="<img src=x>")
    assert Text(foreign._repr_html_()).tags == page.tags
    assert "<script>alert(1)</script>" in Text(foreign._repr_html_()).text


def test_results_by_gpus_show_themselves_too(result: optuna_dsat.TuneResult) -> None:
    several = optuna_dsat.TuneResult.of(replace(result, by_gpus={1: result, 2: result}))
    assert all(isinstance(item, optuna_dsat.TuneResult) for item in several.by_gpus.values())
    assert f"On 2 {slot_name(result.device)}s" in Text(several._repr_html_()).text


def test_a_table_of_pandas_has_the_rows_of_export(result: optuna_dsat.TuneResult, run_here: Run) -> None:
    pandas = pytest.importorskip("pandas")
    table = result.to_dataframe()
    assert isinstance(table, pandas.DataFrame)
    printed = run_here("export", result.study, "--format", "csv", "--storage", result.storage).stdout
    exported = list(csv.DictReader(io.StringIO(printed)))
    assert list(table.columns) == list(exported[0])
    assert "param:zero_stage" in table.columns
    assert [str(number) for number in table["number"]] == [row["number"] for row in exported]
    assert not table.map(lambda value: isinstance(value, dict)).any(axis=None)
    assert table[table["handed_over"]].iloc[0]["number"] == result.trial


def test_without_pandas_one_line_says_how_to_get_it(
    result: optuna_dsat.TuneResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="needs pandas, which is not installed: pip install pandas"):
        result.to_dataframe()


def test_figures_are_those_of_the_report(result: optuna_dsat.TuneResult) -> None:
    for kind in ("metric", "progress", "finalists"):
        figure = result.plot(kind)
        assert isinstance(figure, go.Figure)
        assert figure.data, kind
    with pytest.raises(ValueError, match=r"kind is 'speed'; it must be one of .*metric"):
        result.plot("speed")


OPTIONS = ("train.py", "ds.json", "--cpu-ranks", "2", "--metric", "throughput", "--quiet")


def test_options_of_the_confirmation_and_the_batch_reach_the_study(bench: EntryPointBench, run_here: Run) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    (bench.folder / "ds.json").write_text(json.dumps(config))
    options = ("--tie", "2%", "--batch", "keep", "--divisible-by", "2", "--dataset-size", "100")
    done = run_here("random", *OPTIONS, *options, "--confirm-time", "0", "--max-trials", "3", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["train_batch_size"], result["dataset_size"]) == (8, 100)
    assert result["config"]["train_micro_batch_size_per_gpu"] % 2 == 0
    assert result["verdict"]["kind"] == "unconfirmed", "no time for rounds"


@pytest.mark.parametrize(
    ("text", "value"), [("1%", 0.01), (" 2.5 % ", 0.025), ("0.03", 0.03), (0.01, 0.01), ("0", 0.0)]
)
def test_a_share_is_a_percentage_or_a_number(text: str | float, value: float) -> None:
    assert share(text) == pytest.approx(value)
    with pytest.raises(UsageError):
        share("%")
