"""What the commands on stored studies say of them."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import create_engine, text

from optuna_dsat.cli.show import show_result
from optuna_dsat.cli.studies import best, delete, launch_lines, result_lines, show, studies
from optuna_dsat.cli.trials import ExportFormat, TrialOrder, export, trials
from optuna_dsat.errors import NothingRunnableError, UsageError
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.write import write_report
from optuna_dsat.store import Store
from optuna_dsat.study.confirm.verdict import VerdictKind
from optuna_dsat.study.end_reason import EndReason, continuing, headroom_in_words
from optuna_dsat.study.options.declaration import DEFAULT_STORAGE
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes
from optuna_dsat.words import count_in_words, metric_in_words
from tests.harness.entry_points import Ended, Run, run_here
from tests.harness.landscapes import Hill
from tests.harness.reports import ReportedStudyBench
from tests.harness.simulated import SimulatedResult
from tests.harness.studies import StudyBench

__all__ = ["run_here"]


def test_launches_that_a_stop_took_are_told_apart_from_those_that_count() -> None:
    assert [*launch_lines({"measured": 2, "lost": 1}, {}, used=2, most=2)] == [
        "Trials: 2 of at most 2 (2 measured).",
        "Not counted: 1 trial lost by a stop or a crash; each is repeated under another number.",
    ]
    assert [*launch_lines({"measured": 3, "out_of_memory": 1}, {"measured": 1}, used=4, most=9)] == [
        "Trials: 4 of at most 9 (3 measured, 1 out of memory).",
        "Not counted: a trial of the best without settings that may have no effect (1 measured).",
    ]
    assert next(launch_lines({"lost": 2}, {}, used=0, most=9)) == "Trials: 0 of at most 9."


def test_why_nothing_was_measured_is_told(tmp_path: Path) -> None:
    """``show`` said "Nothing was measured yet" of a search that was over, and not what its launches ended with."""
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as store:
        bench = ReportedStudyBench(tmp_path, store)
        hill = Hill()
        refused = SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=5.0, message="rank 0: out of memory")
        hill.override = lambda _: refused if len(hill.configs) > 1 else None  # the first is the profile launch
        with pytest.raises(NothingRunnableError):
            bench.run(bench.spec(name="failed", max_trials=2, confirm=0), hill)
        stored = read_stored(store, "failed")
        assert [*result_lines(stored)] == ["Nothing was measured.", "Launches ended with: rank 0: out of memory"]
        begun = replace(stored, spec=stored.spec.model_copy(update={"max_trials": 3}), trials=())
        assert [*result_lines(begun)] == ["Nothing was measured yet."]


def test_a_list_of_nothing_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a database whose last study was deleted, ``studies`` printed headings."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with Store.open(url) as store:
        bench = ReportedStudyBench(tmp_path, store)
        store.create_study("new", bench.spec(name="new").model_dump(mode="json"))
    trials("new", url)
    assert capsys.readouterr().out == "The study has no trial yet: the profile launch comes first.\n"
    with pytest.raises(UsageError, match="--yes"):  # a test has no terminal; the command ended without a line
        delete("new", url)
    delete("new", url, yes=True)
    capsys.readouterr()
    studies(url)
    assert capsys.readouterr().out == "There is no study in this database.\n"


def test_without_a_name_the_latest_study_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with Store.open(url) as store:
        bench = ReportedStudyBench(tmp_path, store)
        with pytest.raises(UsageError, match="There is no study in"):
            show(storage=url)
        for name in ("zebra", "ant"):
            store.create_study(name, bench.spec(name=name).model_dump(mode="json"))
    show(storage=url)
    shown = capsys.readouterr().out
    assert shown.startswith("Study ant: ")
    assert f"\nThe search has not ended. Continue or join it with: optuna-dsat resume ant --storage {url}\n" in shown
    with pytest.raises(UsageError, match="There is no study ''"):  # the variable in `resume "$STUDY"` may not be set
        show(name="", storage=url)
    for command in (trials, export):
        command(storage=url)
        assert "zebra" not in capsys.readouterr().out
    with pytest.raises(NothingRunnableError, match="The study 'ant'"):
        best(storage=url)


def test_a_search_that_its_budget_ends_reports_what_may_be_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Result, report and JSON did not contain that several times the metric may be left."""
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as store:
        bench = ReportedStudyBench(tmp_path, store)
        spec = bench.spec(method="guided", max_trials=3, confirm=0)
        result = bench.run(spec, Hill())
        page = write_report(store, "s", tmp_path / "report.html").read_text(encoding="utf-8")
    assert result is not None
    assert result.headroom is not None
    words = headroom_in_words(result.headroom)
    assert words in page
    show_result(result, as_json=True)
    assert json.loads(capsys.readouterr().out)["headroom"] == result.headroom
    show_result(replace(result, continued=1), as_json=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert words in printed
    assert "Trials: 3 measured, in 2 launches besides profile and rounds;" in printed
    url = f"sqlite:///{tmp_path / 'study.db'}"
    show("s", url)
    shown = " ".join(capsys.readouterr().out.split())
    assert words in shown
    assert f"More trials: optuna-dsat resume s --max-trials 6 --storage {url}" in shown
    undecided = replace(result.verdict, kind=VerdictKind.NOT_CONFIRMED)
    assert [*continuing(spec, DEFAULT_STORAGE, reason=EndReason.TIMEOUT, verdict=undecided)] == [
        "More trials: optuna-dsat resume s",
        "More rounds: optuna-dsat resume s --confirm-time 3600",
    ]
    show("s", url, as_json=True)
    assert json.loads(capsys.readouterr().out)["headroom"] == result.headroom


def test_what_an_earlier_run_said_may_be_left_is_cleared_by_one_that_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with Store.open(url) as store:
        bench = ReportedStudyBench(tmp_path, store)
        spec = bench.spec(method="random", max_trials=2, confirm=0)
        assert bench.run(spec, Hill()) is not None
        bench.study().set_user_attr(attributes.HEADROOM, 2.0)
        result = bench.run(spec.model_copy(update={"max_trials": 3}), Hill())
    assert result is not None
    assert result.headroom is None
    show("s", url, as_json=True)
    assert json.loads(capsys.readouterr().out)["headroom"] is None
    show("s", url)
    shown = capsys.readouterr().out
    assert not any(words in shown for words in ("90% probability", "has not ended"))


class Thirsty(Hill):
    """The faster, the fewer samples per joule."""

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        micro_batch = ds_config["train_micro_batch_size_per_gpu"]
        return replace(super().run(ds_config, slots), power_w=10.0 * micro_batch**2)


def test_samples_per_joule_are_stored_and_shown_where_the_power_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with Store.open(url) as store:
        bench = ReportedStudyBench(tmp_path, store)
        result = bench.run(bench.spec(max_trials=6, confirm=2), Thirsty())
        page = write_report(store, "s", tmp_path / "report.html").read_text(encoding="utf-8")
    assert result is not None
    power_w = 10.0 * result.config["train_micro_batch_size_per_gpu"] ** 2
    assert result.metrics["power_w"] == pytest.approx(power_w)
    per_joule = result.metrics["throughput"] / power_w
    assert json.loads(Path(result.metrics_path).read_text())["metrics"]["samples_per_joule"] == pytest.approx(per_joule)
    shown = f"Energy: {metric_in_words('samples_per_joule', per_joule)} at {power_w:,.0f} W, your config "
    assert shown in page
    show("s", url)
    assert shown in " ".join(capsys.readouterr().out.split())
    trials("s", url, sort=TrialOrder.ENERGY, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    known = [row["metrics"].get("samples_per_joule", 0.0) for row in rows]
    assert known == sorted(known, reverse=True)
    assert rows[0]["metrics"]["power_w"] < power_w, "not the order of the speeds"
    trials("s", url, sort=TrialOrder.ENERGY)
    heading, _, first = capsys.readouterr().out.splitlines()[:3]
    assert "samples/J" in heading
    assert f" {count_in_words(known[0])} " in first
    export("s", url, ExportFormat.CSV)
    assert "metric:samples_per_joule" in capsys.readouterr().out.splitlines()[0]


def make_shop(path: Path) -> None:
    with closing(sqlite3.connect(path)) as shop:
        shop.execute("CREATE TABLE goods (id INTEGER PRIMARY KEY)")


def make_optunas(path: Path) -> None:
    optuna.create_study(storage=f"sqlite:///{path}")


@pytest.mark.parametrize("make", [make_shop, make_optunas])
def test_a_database_of_others_is_neither_upgraded_nor_changed_and_none_is_made(
    run_here: Run, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    file = tmp_path / "others.db"
    make(file)
    before = file.read_bytes()
    done = run_here("db", "upgrade", "--storage", f"sqlite:///{file}")
    assert done.returncode == 2
    assert "nothing to upgrade in the database" in done.stderr
    assert file.read_bytes() == before
    done = run_here("db", "upgrade", "--storage", f"sqlite:///{tmp_path / 'typo.db'}")
    assert done.returncode == 2
    assert "There is no database" in done.stderr
    assert list(tmp_path.iterdir()) == [file]


UNREADABLE = 5


@pytest.fixture(scope="module")
def two_studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with two finished studies, ``good`` and ``bad``; not to be changed."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "train.py").write_text("")
    with Store.open(f"sqlite:///{folder / 'study.db'}") as store:
        bench = StudyBench(folder, store)
        for name in ("good", "bad"):
            bench.run(bench.spec(name=name, max_trials=3, confirm=1), Hill())
    return folder / "study.db"


class Altered:
    """A copy of the database, of whose study ``bad`` something is changed."""

    def __init__(self, url: str, run: Run) -> None:
        self._url = url
        self._run = run

    def __call__(self, *arguments: str) -> Ended:
        return self._run(*arguments, "--storage", self._url)

    def execute(self, query: str, **values: Any) -> None:
        """Change rows."""
        engine = create_engine(self._url)
        try:
            with engine.begin() as connection:
                assert connection.execute(text(query), values).rowcount > 0
        finally:
            engine.dispose()

    def spec(self, **changes: Any) -> None:
        engine = create_engine(self._url)
        with engine.connect() as connection:
            result = connection.execute(text("SELECT spec FROM dsat_studies WHERE name = 'bad'")).scalar_one()
        engine.dispose()
        spec = json.loads(result) if isinstance(result, str) else result
        self.execute("UPDATE dsat_studies SET spec = :spec WHERE name = 'bad'", spec=json.dumps({**spec, **changes}))


@pytest.fixture
def altered(two_studies: Path, tmp_path: Path, run_here: Run) -> Altered:
    shutil.copy(two_studies, tmp_path / "study.db")
    return Altered(f"sqlite:///{tmp_path / 'study.db'}", run_here)


def test_it_is_listed_as_such_beside_the_others(altered: Altered) -> None:
    altered.execute("""UPDATE dsat_studies SET versions = '{"optuna-dsat": "9.1"}' WHERE name = 'bad'""")
    altered.spec(of_a_newer_version=1)
    listed = altered("studies")
    assert listed.returncode == 0, listed.stderr
    assert "good" in listed.stdout
    assert "bad cannot be read: " in listed.stdout
    rows = json.loads(altered("studies", "--json").stdout)
    assert rows[0]["study"] == "good"
    assert rows[0]["best"] is not None
    assert set(rows[1]) == {"study", "unreadable"}
    for command in ("resume", "trials", "best", "export", "explain", "report", "show"):
        ended = altered(command, "bad")
        assert ended.returncode == UNREADABLE, (command, ended.stderr)
        assert len(ended.stderr.strip().splitlines()) == 1, (command, ended.stderr)
        assert ended.stderr.startswith("optuna-dsat: The study 'bad' cannot be read: ")
        assert "its spec: of_a_newer_version" in ended.stderr
        assert "(made by optuna-dsat 9.1)" in ended.stderr
    assert altered("show", "good").returncode == 0
    assert altered("delete", "bad", "--yes").returncode == 0
    assert "cannot be read" not in altered("studies").stdout
