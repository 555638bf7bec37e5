"""A tuner that is killed in the middle of a launch of two ranks leaves nothing that the next start does not remove."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.commands import Command, search, write_config
from tests.harness.launches import SCRIPTS
from tests.harness.workers import StoredStudy, ended, wait_until

pytestmark = pytest.mark.torchrun

ROOT = Path(__file__).parents[2]
TUNER = """
import sys
from pathlib import Path
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.protocol import ScriptCommand
from optuna_dsat.launch.launcher import TorchrunLauncher
from tests.harness.launches import request
cwd, script = Path.cwd(), sys.argv[1]
launcher = TorchrunLauncher(cwd / "out", devices=cpu_devices(2))
(cwd / "ds.json").write_text("{}")
command = ScriptCommand(script=script, args=("ds.json", str(cwd)), cwd=str(cwd), config_path=str(cwd / "ds.json"))
launcher.start(request(cwd, command=command))
while True:
    launcher.poll(1.0)
"""
NEXT = """
import os
from optuna_dsat.launch.machine.journal import LeftoverWatch
LeftoverWatch(os.environ, on_notice=print).begin()
"""


def test_what_a_killed_tuner_leaves_is_removed_by_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    before = set(Path("/dev/shm").glob("deepspeed_*"))
    with subprocess.Popen(
        [sys.executable, "-c", TUNER, str(SCRIPTS / "leaves.py")], cwd=tmp_path, env=environ
    ) as tuner:
        ranks = [tmp_path / "rank0", tmp_path / "rank1"]
        try:
            wait_until(lambda: all(one.exists() and one.read_text() for one in ranks), what="both ranks are up")
        finally:
            tuner.kill()
    pids = [int(pid) for one in ranks for pid in one.read_text().split()]
    folders = list((tmp_path / "tmp").glob("leaves-*"))
    shared = [path for path in set(Path("/dev/shm").glob("deepspeed_*")) - before if _is_of(path, tmp_path)]
    assert len(folders) == 2
    assert len(shared) == 2 or shutil.which("c++") is None
    done = subprocess.run(
        [sys.executable, "-c", NEXT], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    wait_until(lambda: all(ended(pid) for pid in pids), what="no process is left")
    assert [path for path in (*folders, *shared) if path.exists()] == []
    assert "4 temporary folders" in done.stdout, "of each rank: its own, and that of multiprocessing"
    assert done.stdout.count("\n") == 1
    assert not shared or "2 files in shared memory" in done.stdout
    assert list((tmp_path / "tmp").glob("optuna-dsat-*/launches/*")) == []
    again = subprocess.run([sys.executable, "-c", NEXT], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "temporary" not in again.stdout


def _is_of(path: Path, folder: Path) -> bool:
    """Whether a buffer belongs to the launch below a folder, by the notes of its ranks."""
    return any(str(path) in record.read_text() for record in (folder / "tmp").rglob("*.jsonl"))


def test_kill_9_ends_the_launch_and_resume_spends_the_budget_exactly(tmp_path: Path) -> None:
    write_config(tmp_path)
    url = "sqlite:///study.db"
    tuner = Command(tmp_path, *search("killed", url, budget=2))
    try:
        events = tmp_path / "optuna-dsat-output" / "killed" / "trial-0001" / "events" / "rank0.jsonl"
        wait_until(events.exists, what="the rank of the second launch is alive")
        assert len(tuner.launched()) >= 2, "torchrun and its rank"
    finally:
        tuner.kill()
    wait_until(lambda: not tuner.launched(), what="its launch and what that started are gone", limit_s=10.0)
    Command(tmp_path, "resume", "killed", "--storage", url, "--quiet").finish()
    study = StoredStudy.read(f"sqlite:///{tmp_path}/study.db", "killed")
    study.check_whole(budget=2)
    assert len(study.lost) == 1
