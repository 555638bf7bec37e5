from __future__ import annotations

import json
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import make_url

from optuna_dsat.errors import UsageError
from optuna_dsat.report.dashboard.live_app import tail
from optuna_dsat.report.dashboard.publish import MEMORY_PLOT, METRIC_PLOT, publish
from optuna_dsat.store import Store
from optuna_dsat.study.stored import record_of
from tests.harness.entry_points import leave
from tests.harness.landscapes import Hill
from tests.harness.reports import ReportedStudyBench, serving

dashboard = pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")


def study_attributes(bench: ReportedStudyBench) -> dict[str, Any]:
    study = bench.study()
    return dict(study._storage.get_study_system_attrs(study._study_id))


def test_a_finished_study_has_its_notes_and_plots_already(finished: ReportedStudyBench) -> None:
    assert "## What was tuned" in dashboard.get_note(finished.study())
    keys = study_attributes(finished)
    assert f"dashboard:plot_data:{METRIC_PLOT}:0" in keys
    assert f"dashboard:plot_data:{MEMORY_PLOT}:0" in keys
    assert keys["study:metric_names"] == ["throughput in the search"]


def test_publishing_again_changes_nothing(finished: ReportedStudyBench) -> None:
    publish(finished.store, "s")
    before = study_attributes(finished)
    publish(finished.store, "s")
    assert study_attributes(finished) == before


def test_text_that_people_added_survives_publishing_again(finished: ReportedStudyBench) -> None:
    study = finished.study()
    dashboard.save_note(study, dashboard.get_note(study) + "\nbuy more memory\n")
    record = record_of(finished.store, "s")
    finished.store.update_spec(record.uuid, {**record.spec, "max_trials": 20})
    publish(finished.store, "s")
    note = dashboard.get_note(finished.study())
    assert "16 of 20 trials" in note
    assert note.rstrip().endswith("buy more memory")


def test_of_a_long_log_the_end_is_kept_and_the_rest_is_named(finished: ReportedStudyBench) -> None:
    path = finished.log("trial-0000")
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    first, *rest = tail(path, 100).decode().splitlines()
    assert rest[-1] == "line 999"
    assert all(line.startswith("line ") for line in rest)
    left = path.stat().st_size - sum(len(line) + 1 for line in rest)
    assert first == f"[the first {left} bytes are left out; the whole log: {path}]"
    assert tail(path).decode() == path.read_text()


def test_without_the_extra_a_study_runs_and_the_command_names_what_to_install(
    bench: ReportedStudyBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    assert not [key for key in study_attributes(bench) if key.startswith("dashboard:")]
    assert leave("dashboard", "s", "--storage", bench.url, "--optuna-dashboard") == 2
    error = capsys.readouterr().err
    assert error == "optuna-dsat: optuna-dashboard is not installed: pip install 'optuna-dsat[dashboard]'\n"


def test_a_note_that_cannot_be_written_does_not_cost_the_result(
    bench: ReportedStudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr("optuna_dsat.report.dashboard.publish.publish", fail)
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    assert "no room" in str(bench.news[-1])


def test_an_unknown_study_is_refused_with_those_there_are(
    finished: ReportedStudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave("dashboard", "t", "--storage", finished.url) == 2
    assert "no study 't'" in (error := capsys.readouterr().err)
    assert "there: s." in error
    with pytest.raises(UsageError, match=r"there: s\."):
        publish(finished.store, "t")


def test_a_taken_port_is_refused(finished: ReportedStudyBench, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert leave("dashboard", "s", "--storage", finished.url, "--port", str(port)) == 2
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use." in capsys.readouterr().err


@pytest.mark.postgres
def test_on_postgres_the_password_reaches_neither_process_list_nor_page(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_url(postgres_url).set(password="s3cret").render_as_string(hide_password=False)
    (tmp_path / "train.py").write_text("")
    with Store.open(url) as store:
        bench = ReportedStudyBench(tmp_path, store)
        bench.run(bench.spec(max_trials=3, confirm=0), Hill())
    monkeypatch.setenv("OPTUNA_DSAT_STORAGE", url)
    with serving("s", "--port", "0", "--optuna-dashboard") as (process, address):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        commands = [word for item in family for word in item.cmdline()]
        page = address.replace("/dashboard/studies/", "/api/studies/")
        with urllib.request.urlopen(f"{page}?after=0", timeout=20) as response:
            shown = response.read().decode()
    assert "optuna-dsat resume s --storage" in shown
    assert len(json.loads(shown)["plotly_graph_objects"]) == 2
    assert "s3cret" not in shown
    assert not [word for word in commands if "s3cret" in word]
