"""The public outputs of a study as recorded: whoever changes one decides so, and records it with ``RECORD=1``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import optuna
import pytest

from optuna_dsat.display.lines import lines_of
from optuna_dsat.report.cards import answers_of, cards_of
from optuna_dsat.report.dashboard.notes import study_note, trial_note
from optuna_dsat.report.facts import Training
from optuna_dsat.store import Store
from tests.harness.entry_points import leave
from tests.harness.reports import ReportedStudyBench
from tests.report.test_one_best import Changing

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = {"show.json": ["show", "s", "--json"], "show.txt": ["show", "s"], "trials.json": ["trials", "s", "--json"],
            "export.csv": ["export", "s", "--format", "csv"], "studies.json": ["studies", "--json"],
            "best.json": ["best", "s"], "export.md": ["export", "s", "--format", "markdown"]}  # fmt: skip
AT_80_COLUMNS = {"trials.80.txt": ["trials", "s"], "studies.80.txt": ["studies"],
                 "trials.top.80.txt": ["trials", "s", "--sort", "speed", "--top", "2"]}  # fmt: skip
NAMES = (*COMMANDS, *AT_80_COLUMNS, "result.json", "metrics_file.json", "lines.txt", "cards.txt", "study_note.md",
         "trial_notes.md")  # fmt: skip


def outputs(
    bench: ReportedStudyBench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    result = bench.run(bench.spec(max_trials=6, confirm=2, batch="both"), Changing(lucky=3), noise=0.01)
    view = bench.view()
    yield "result.json", json.dumps(result.to_json(), indent=1)
    yield "metrics_file.json", Path(result.metrics_path).read_text()
    yield "lines.txt", "\n".join(line for event in bench.news for line in lines_of(event))
    cards = cards_of(view, Training(dataset_size=10_000, price_per_gpu_hour=2.0))
    yield "cards.txt", "\n".join(map(str, [*answers_of(view), *cards]))
    yield "study_note.md", study_note(view)
    yield "trial_notes.md", "\n".join(trial_note(view, trial) for trial in view.launched)
    for name, args in COMMANDS.items():
        capsys.readouterr()
        leave(*args, "--storage", bench.url)
        yield name, capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, args in AT_80_COLUMNS.items():
        leave(*args, "--storage", bench.url)
        yield name, capsys.readouterr().out


def masked(text: str, names: Mapping[str, str]) -> str:
    """Return a text without what differs between runs and machines, and without folds of long commands.

    Numbers have 9 digits: the last bits follow the alignment of arrays in memory.
    """
    text = re.sub(r"\d+\.\d{9,}(e-?\d+)?", lambda number: f"{float(number[0]):.9g}", text)
    text = re.sub(r" \\\n\s*", " ", text)
    for name, shown in {**names, "\r\n": "\n"}.items():
        text = text.replace(name, shown)
    text = re.sub(r'("versions": )\{[^}]*\}|(\| Versions \|).*', r"\1\2", text)
    text = re.sub(r"^(2 x simulated), .*", r"\1, VERSIONS", text, flags=re.MULTILINE)
    return re.sub(r"20\d\d-\d\d-\d\d \d\d:\d\d", "DATE", text).rstrip() + "\n"


def test_public_outputs_are_the_recorded_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (tmp_path / "train.py").write_text("")
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as store:
        result = dict(outputs(ReportedStudyBench(tmp_path, store), capsys, monkeypatch))
    names = {str(tmp_path): "/folder", f"{Path(sys.executable).parent}/": ""}
    result = {name: masked(text, names) for name, text in result.items()}
    if os.environ.get("RECORD"):
        for name, text in result.items():
            (GOLDEN / name).write_text(text)
    assert result == {name: (GOLDEN / name).read_text() for name in NAMES}
