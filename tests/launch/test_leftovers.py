"""Leftovers of a killed tuner are removed by the next start, and nothing else is removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.agent.run import MachineLaunch
from optuna_dsat.launch.launcher import local_launcher
from optuna_dsat.launch.machine import journal
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.machine.host import own_folder
from optuna_dsat.launch.machine.journal import (
    LeftoverWatch,
    TunerNotes,
    any_gone,
    gone_tuners,
    remove_leftovers,
    removed_in_words,
)
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.launch.run_directory import PreparedLaunch
from optuna_dsat.runtime.adapt.journal import note
from optuna_dsat.runtime.agent.processes import MARK_ENV
from optuna_dsat.runtime.process_identity import process_space
from tests.harness.launches import request
from tests.harness.workers import ended, wait_until

TUNER = '''
import os, subprocess, sys
from pathlib import Path
from optuna_dsat.launch.machine.journal import TunerNotes
from optuna_dsat.launch.machine.processes import MARK_ENV, new_mark
from optuna_dsat.runtime.adapt.journal import note
folder, made = Path(sys.argv[1]), Path(sys.argv[2])
notes = TunerNotes(made, folder=folder)
record = notes.begin()
(made / "temporary").mkdir(parents=True)
(made / "trial-0000").mkdir()
(made / "trial-0000" / f".launch.json.{os.getpid()}").touch()
(made / "trial-0000" / ".launch.json.1").touch()
note(record, str(made / "temporary"))
CODE = """
import sys, time
from multiprocessing import get_context, resource_tracker
from multiprocessing.shared_memory import SharedMemory
lock, mapped = get_context("spawn").Lock(), SharedMemory(create=True, size=4096)
resource_tracker.unregister(mapped._name, "shared_memory")  # as of a library that tracks nothing
print(lock._semlock.name, mapped.name, flush=True)
time.sleep(600)
"""
mark = {**os.environ, MARK_ENV: new_mark()}
rank = subprocess.Popen([sys.executable, "-c", CODE], env=mark, stdout=subprocess.PIPE, text=True)
lock, mapped = rank.stdout.readline().split()
print(rank.pid, f"/dev/shm/sem.{lock.strip('/')}", f"/dev/shm/{mapped}", flush=True)
sys.stdin.read()
notes.close()
'''


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}


@pytest.fixture
def tuner(notes: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", TUNER, str(notes), str(tmp_path / "made")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def rank_of(tuner: subprocess.Popen[str]) -> tuple[int, list[Path]]:
    """Return the PID of a tuner's rank, and its files in shared memory: tracked and untracked."""
    assert tuner.stdout is not None
    pid, *shared = tuner.stdout.readline().split()
    return int(pid), [Path(item) for item in shared]


def test_what_a_killed_tuner_left_is_removed(
    tuner: subprocess.Popen[str], notes: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    (rank, shared), made = rank_of(tuner), tmp_path / "made"
    assert all(path.exists() for path in shared)
    remove_leftovers(environ, notes=notes)
    assert not ended(rank), "its tuner lives"
    assert (made / "temporary").is_dir()
    assert not any_gone(notes)
    tuner.kill()
    tuner.wait()
    assert any_gone(notes)
    removed = remove_leftovers(environ, notes=notes)
    wait_until(lambda: ended(rank), what="its rank is gone")
    assert (removed["folders"], removed["partial_files"]) == (1, 1)
    assert "1 temporary folder, 1 partly written file" in removed_in_words(removed)
    wait_until(lambda: not any(path.exists() for path in shared), what="its shared memory is gone")
    assert not (made / "temporary").exists()
    assert [path.name for path in (made / "trial-0000").iterdir()] == [".launch.json.1"], "another process writes that"
    assert list(notes.iterdir()) == []


def test_a_tuner_that_ends_by_itself_leaves_no_notes(tuner: subprocess.Popen[str], notes: Path) -> None:
    rank, shared = rank_of(tuner)
    os.kill(rank, 9)
    tuner.communicate()
    for path in shared:  # this tuner follows no launch, so it removes none of these
        path.unlink(missing_ok=True)
    assert list(notes.iterdir()) == []


@pytest.mark.parametrize(
    ("space", "left_alone"),
    [
        (process_space() + "1", True),
        ("another-boot:1", False),
    ],
    ids=["a-container-beside", "before-the-restart"],
)
def test_another_container_keeps_its_notes(notes: Path, space: str, left_alone: bool) -> None:
    (notes / "one").mkdir()
    (notes / "one.lock").touch()
    (notes / "one" / "tuner").write_text(json.dumps({"pid": 1, "space": space, "output_dir": "/nowhere"}))
    with gone_tuners(notes) as result:
        assert [tuner.pid for tuner in result] == ([] if left_alone else [None])
    assert (notes / "one").exists() is left_alone


def test_what_others_leave_is_removed_while_a_search_runs(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    text: list[str] = []
    gone = [False]
    monkeypatch.setattr(journal, "any_gone", lambda: gone[0])
    monkeypatch.setattr(journal, "remove_leftovers", lambda _: Counter(processes=2, shared_memory=1))
    watch = LeftoverWatch(environ, on_notice=text.append)
    gone[0] = True
    watch.check()
    assert text == [], "it has just looked"
    monkeypatch.setattr(journal, "_WATCH_S", -1.0)
    watch.check()
    assert text == ["Removed what a killed run had left: 2 processes, 1 file in shared memory."]


def test_a_search_that_ends_looks_once_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text: list[str] = []
    monkeypatch.setattr(journal, "any_gone", lambda: True)
    monkeypatch.setattr(journal, "remove_leftovers", lambda _: Counter(folders=1))
    local_launcher(tmp_path / "out", devices=cpu_devices(1), on_notice=text.append).close()
    assert text == ["Removed what a killed run had left: 1 temporary folder."]


def test_the_own_folder_is_nobody_else_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = own_folder("launches", parent=tmp_path)
    assert made.parent == tmp_path / f"optuna-dsat-{os.getuid()}"
    assert made.parent.stat().st_mode & 0o777 == 0o700
    made.parent.chmod(0o777)
    assert own_folder(parent=tmp_path).stat().st_mode & 0o777 == 0o700
    result: Any = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: result + 1)
    (tmp_path / f"optuna-dsat-{result + 1}").mkdir()
    with pytest.raises(UsageError, match="another user's"):
        own_folder(parent=tmp_path)
    (tmp_path / f"optuna-dsat-{result + 1}").rmdir()
    (tmp_path / f"optuna-dsat-{result + 1}").symlink_to(made)
    with pytest.raises(UsageError, match="or no folder"):
        own_folder(parent=tmp_path)


def test_two_claims_do_not_meet(notes: Path, tmp_path: Path) -> None:
    item, two = TunerNotes(tmp_path, folder=notes), TunerNotes(tmp_path, folder=notes)
    assert item.begin() != two.begin()
    assert item.begin().parent != two.begin().parent
    assert not any_gone(notes)
    item.close()
    two.close()
    assert list(notes.iterdir()) == []


def test_a_launch_that_is_interrupted_as_it_starts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after its processes were started and before the launcher follows them."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(_: LaunchRequest, prepared: PreparedLaunch, **__: Any) -> None:
        assert prepared.directory.leavings is not None
        (tmp_path / "temporary").mkdir()
        note(prepared.directory.leavings, str(tmp_path / "temporary"))
        started.append(subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: prepared.mark}))
        raise KeyboardInterrupt

    monkeypatch.setattr(MachineLaunch, "start", interrupted)
    launcher = local_launcher(tmp_path / "out", devices=cpu_devices(2))
    with pytest.raises(KeyboardInterrupt):
        launcher.start(request(tmp_path))
    assert started[0].wait(10) == -signal.SIGTERM
    assert not (tmp_path / "temporary").exists()
    assert launcher.free_slots == 2
    launcher.close()
