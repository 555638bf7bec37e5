"""What a launch's processes leave in the temporary folder goes with them, also when they are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from optuna_dsat.launch.classify import StopReason
from optuna_dsat.launch.processes import MARK_ENV, new_mark
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.running import RunningLaunch
from optuna_dsat.launch.slots import SlotLease
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.side_effects import record_temporary_folders, remove_recorded_folders
from tests.harness.launches import request

RANK = """
import sys, tempfile, time
from pathlib import Path
from tempfile import mkdtemp
from optuna_dsat.runtime.side_effects import record_temporary_folders
record_temporary_folders(Path(sys.argv[1]))
made = [tempfile.mkdtemp(prefix="tracker-"), mkdtemp()]
Path(made[0], "file").touch()
print(*made, flush=True)
time.sleep(600)
"""


def test_folders_of_a_killed_rank_are_removed(tmp_path: Path) -> None:
    directory, mark = RunDirectory.create(tmp_path, "trial-0000"), new_mark()
    agent = subprocess.Popen(
        [sys.executable, "-c", RANK, str(directory.temporary_folders)],
        env={**os.environ, MARK_ENV: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    with agent.stdout as output:
        folders = [Path(one) for one in output.readline().split()]
    assert len(folders) == 2
    assert all(folder.is_dir() for folder in folders)
    launch = RunningLaunch(
        request=request(tmp_path, slots=1),
        directory=directory,
        lease=SlotLease(devices=(), baseline_bytes={}),
        mark=mark,
        agent=agent,
        command=(),
        started=0.0,
        started_unix=0.0,
        oom_kills_before=None,
    )
    launch.end(StopReason(outcome=Outcome.PRUNED, message="enough"))
    agent.wait()
    now = 1.0
    while launch.gone_at is None:
        launch.advance(now)
        now += 1.0
    assert not any(folder.exists() for folder in folders)


def test_only_folders_in_the_temporary_folder_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", tempfile.mkdtemp)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    record = tmp_path / "record"
    record_temporary_folders(record)
    (tmp_path / "own").mkdir()
    made, own = tempfile.mkdtemp(), tempfile.mkdtemp(dir=tmp_path / "own")
    assert [json.loads(line) for line in record.read_text().splitlines()] == [made]
    record.write_text(record.read_text() + '"relative"\n"cut of')
    remove_recorded_folders(record)
    assert not Path(made).exists()
    assert Path(own).exists()
    remove_recorded_folders(tmp_path / "none")
