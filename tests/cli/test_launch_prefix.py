"""The command that trains today, behind a search: what becomes of its ranks where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import typer

from optuna_dsat.cli import app
from optuna_dsat.cli.launch_prefix import unfold_command


def unfolded(folder: Path, *words: str) -> list[str]:
    folder.joinpath("train.py").write_text("")
    group: Any = typer.main.get_command(app)
    return unfold_command(["random", *words], group, cwd=folder)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ranks_of_the_launcher_are_those_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    found = unfolded(tmp_path, "torchrun", "--nproc_per_node", str(ranks), "train.py")
    assert found[found.index("--cpu-ranks") + 1] == str(ranks)
    assert f"on the CPU, with {ranks} rank" in capsys.readouterr().err


def test_more_ranks_than_cores_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = unfolded(tmp_path, "torchrun", "--nproc_per_node", "8", "train.py")
    assert "--cpu-ranks" not in found
    assert "fewer ranks than 8, as it has 2 cores" in capsys.readouterr().err


def test_the_searchs_own_option_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = unfolded(tmp_path, "--cpu-ranks", "2", "torchrun", "--nproc_per_node", "1", "train.py")
    assert found.count("--cpu-ranks") == 1
    assert found[found.index("--cpu-ranks") + 1] == "2"
    assert capsys.readouterr().err == ""
