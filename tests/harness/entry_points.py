"""Searches through the doors that users take, over a simulated landscape instead of real launches."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.launch.simulated import Landscape, SimulatedLauncher
from optuna_dsat.tuning import run
from tests.harness.landscapes import Hill

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


class EntryPointBench:
    """A folder with a script and its config, and the landscape that its launches meet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.landscape: Landscape = Hill()
        self.arguments: list[Any] = []
        """What each launcher was made with: its output directory."""

    def launcher(self, output_dir: Any, **_: Any) -> SimulatedLauncher:
        self.arguments.append(output_dir)
        return SimulatedLauncher(self.landscape, total_slots=2)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EntryPointBench]:
    (tmp_path / "train.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    monkeypatch.chdir(tmp_path)
    made = EntryPointBench(tmp_path)
    monkeypatch.setattr(run, "TorchrunLauncher", made.launcher)
    monkeypatch.setattr(run, "kill_leftovers", lambda: ())  # those of tests that run beside this one
    before = signal.getsignal(signal.SIGTERM)  # the command sets its own
    yield made
    signal.signal(signal.SIGTERM, before)
