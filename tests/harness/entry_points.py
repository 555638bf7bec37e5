"""Searches through the user's entry points, over a simulated landscape instead of real launches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.cli import main
from optuna_dsat.escape import shell
from optuna_dsat.launch.machine.journal import LeftoverWatch
from optuna_dsat.tuning import run
from tests.harness.landscapes import Hill
from tests.harness.simulated import Landscape, SimulatedLauncher

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


class EntryPointBench:
    """A folder with a script and its config, and the landscape of its launches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.landscape: Landscape = Hill()
        self.arguments: list[Any] = []
        """Output directory of each created launcher."""

    def launcher(self, output_dir: Any, **_: Any) -> SimulatedLauncher:
        self.arguments.append(output_dir)
        return SimulatedLauncher(self.landscape, total_slots=2)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Result of a command."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]
"""Runs ``optuna-dsat`` with arguments."""


def leave(*arguments: str) -> int:
    """Run ``optuna-dsat`` in this process; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    code = ended.value.code
    return code if isinstance(code, int) else int(bool(code))


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run ``optuna-dsat`` in this process, from the test's folder; saves the second that a separate process takes."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)

    def call(*arguments: str) -> Ended:
        capfd.readouterr()
        code = leave(*arguments)
        shown = capfd.readouterr()
        return Ended(returncode=code, stdout=shown.out, stderr=shown.err)

    yield call
    sys.path[:] = path


@contextmanager
def searching_in(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[EntryPointBench]:
    """Have searches of this process run in a folder, with a script and its config, over a simulated landscape."""
    (folder / "train.py").write_text("raise SystemExit('never run')\n")
    (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
    patch.chdir(folder)
    patch.setattr(shell, "_left", [])  # commands of other tests may have left folders
    made = EntryPointBench(folder)
    patch.setattr(run, "local_launcher", made.launcher)
    patch.setattr(LeftoverWatch, "begin", lambda _: None)  # removes those of tests that run beside this one
    yield made


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EntryPointBench]:
    with searching_in(tmp_path, monkeypatch) as made:
        yield made
