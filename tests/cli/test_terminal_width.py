"""On a terminal no sentence is cut in the middle of a word, at any width; in a pipe a sentence is one line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.harness.entry_points import DS_CONFIG, leave
from tests.harness.terminal import CONTROL

SEARCH = "guided train.py ds.json --cpu-ranks 2"
COMMANDS = (
    "show nothing-of-this-name --storage sqlite:///a-database-that-is-not-there.db",
    f"{SEARCH} --zero-stages 1 --zero-stages 7",
    f"{SEARCH} --dry-run --study of-another-name --output-dir a-folder-with-a-long-name --fix reduce_bucket_size=5e6",
    "guided --num_gpus 2 train.py --deepspeed ds.json",
    "guide",
    "plan --params 7e9 --gpu h100 --gpus 8",
)


class Terminal(io.TextIOWrapper):
    """A terminal that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        self.seek(0)
        return CONTROL.sub("", self.read()).splitlines()


def shown(monkeypatch: pytest.MonkeyPatch, command: str, *, columns: int) -> list[str]:
    """Return the lines that a command shows on a terminal."""
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    leave(*command.split())
    return screen.lines()


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    columns = 60
    with monkeypatch.context() as patch:
        lines = shown(patch, command, columns=columns)
    assert lines
    assert [line for line in lines if len(line) > columns and len(line.split()) > 1] == []


def test_an_error_in_a_pipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    leave(*COMMANDS[0].split())
    assert len(capsys.readouterr().err.splitlines()) == 1
