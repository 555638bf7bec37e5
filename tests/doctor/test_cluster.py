"""The doctor holds a place for a moment, and says who was there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from optuna_dsat.cli import doctor
from optuna_dsat.doctor import examination
from optuna_dsat.doctor.finding import Finding, Status, exit_code
from optuna_dsat.launch.agent.agent import digest_of
from optuna_dsat.launch.places.place import Layout
from tests.cluster.fakes import FakeEngine

TWO = Layout(nodes=2, slots=1, kind="cpu", gpus=0)


def examine(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    monkeypatch.setattr(examination, "_ALLOCATION_WAIT_S", 1.0)
    return examination.examine_cluster(engine, TWO, files={})


def test_every_node_is_named_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = examine(FakeEngine(), monkeypatch)
    assert [(finding.name, finding.status) for finding in findings] == [
        ("n1", Status.FINE),
        ("n2", Status.FINE),
        ("network", Status.FINE),
    ]
    assert findings[0].text.startswith("n1: 1 CPU ranks; torch 2.13")


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"seen": {1: {"why": "it shows 0 GPUs of the 8 that a launch takes."}}}, Status.FATAL, "n2 cannot run"),
        ({"room": 0}, Status.PROBLEM, "job 1 was not granted in 1 s (Resources)"),
    ],
)
def test_what_is_wrong_is_said(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], status: Status, text: str
) -> None:
    (finding,) = examine(FakeEngine(**changes), monkeypatch)
    assert finding.status is status
    assert text in finding.text
    assert exit_code([finding]) == (3 if status is Status.FATAL else 0)


def test_nodes_are_asked_for_the_script_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, engine = tmp_path / "train.py", FakeEngine(seen={1: {"why": "train.py is not there"}})
    script.write_text("pass")
    monkeypatch.setattr("optuna_dsat.tuning.cluster.engine_of", lambda *_, **__: engine)
    monkeypatch.setattr("optuna_dsat.doctor.examination.examine", lambda **_: [])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit):
        doctor.doctor(on=doctor._Cluster.RAY, script=Path("train.py"), nodes_per_trial=2, as_json=True)
    (result,) = json.loads(capsys.readouterr().out)["findings"]
    assert result["text"].startswith("n2 cannot run the study: train.py is not there.")
    looks = [order["files"] for _, _, order in engine.orders if order["do"] == "look"]
    assert looks == [{str(tmp_path): "folder", str(script): digest_of(script)}] * 2
