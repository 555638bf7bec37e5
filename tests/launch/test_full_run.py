"""Signals that end a foreground training end its ranks and leave nothing behind; a small process replaces torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.machine.journal import remove_leftovers
from tests.harness.waits import ended, wait_until

AGENT = """
import pathlib, signal, subprocess, sys, time
rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
def end(number, frame):
    pathlib.Path("told").write_text(str(number))
    if pathlib.Path("slow").exists():
        while not pathlib.Path("save").exists():
            time.sleep(0.02)
        pathlib.Path("saved").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
print(rank.pid, flush=True)
time.sleep(600)
"""
TUNER = """
import signal, sys
from pathlib import Path
from optuna_dsat.launch.run_directory import PreparedLaunch
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.full_run import run_full
from tests.harness.launches import request
PreparedLaunch.argv = lambda *_: [sys.executable, "-c", sys.argv[1]]
def interrupt(number, frame):
    raise KeyboardInterrupt  # as the command line does
signal.signal(signal.SIGTERM, interrupt)
signal.signal(signal.SIGINT, interrupt)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it, as nohup does
sys.exit(run_full(request(Path.cwd(), purpose="full"), devices=cpu_devices(2)))
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        [sys.executable, "-c", TUNER, AGENT],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # no keyboard: Ctrl-C in the test run must not reach the training
    ) as process:
        yield process
        process.kill()


def rank_of(training: subprocess.Popen[str]) -> int:
    assert training.stdout is not None
    return int(training.stdout.readline())


def notes_in(folder: Path) -> Path:
    return folder / "tmp" / f"optuna-dsat-{os.getuid()}" / "launches"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_nothing_is_left(
    training: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    rank = rank_of(training)
    training.send_signal(number)
    assert training.wait() == 128 + number
    assert (tmp_path / "told").read_text() == str(int(signal.SIGTERM))
    wait_until(lambda: ended(rank), what="its rank is gone")
    assert [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()] == []
    assert not notes_in(tmp_path).exists()


@pytest.mark.parametrize(("second", "saved"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_second_request_ends_at_once_what_still_saves_but_not_the_first_told_again(
    training: subprocess.Popen[str], tmp_path: Path, second: signal.Signals, saved: bool
) -> None:
    rank_of(training)
    (tmp_path / "slow").touch()
    training.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "told").exists, what="it was passed on")
    training.send_signal(second)
    if saved:
        time.sleep(0.5)  # in which a second request would have ended it
        (tmp_path / "save").touch()
    assert training.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists() is saved


def test_what_a_killed_training_leaves_is_removed_by_the_next_start(
    training: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    rank = rank_of(training)
    training.kill()
    training.wait()
    assert any(notes_in(tmp_path).rglob("ds_config.json")), "its run directory"
    remove_leftovers({"TORCH_EXTENSIONS_DIR": str(tmp_path / "none")})
    wait_until(lambda: ended(rank), what="its rank is gone")
    assert not notes_in(tmp_path).exists()
