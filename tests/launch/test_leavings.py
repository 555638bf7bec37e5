"""Leftovers recorded by a launch's processes are removed with them, even if they are killed."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from optuna_dsat.launch.machine.journal import remove_noted
from optuna_dsat.launch.machine.processes import new_mark
from optuna_dsat.launch.protocol import Verdict
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.adapt.journal import SHARED_MEMORY, note, note_shared_buffer
from optuna_dsat.runtime.agent.processes import MARK_ENV
from tests.harness.launches import followed

RANK = """
import os, sys, tempfile, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from tempfile import mkdtemp
from optuna_dsat.runtime.adapt.journal import note_created_files, note_shared_buffer
record, before = Path(sys.argv[1]), Path(sys.argv[2])
sys.stdin.readline()  # what is there when a launch begins is not its own
note_shared_buffer(record, {"MASTER_ADDR": "test", "MASTER_PORT": str(os.getpid())}, rank=0)
note_created_files(record)
made = [tempfile.mkdtemp(prefix="tracker-"), mkdtemp()]
Path(made[0], "file").touch()
buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_test_{os.getpid()}_0")
buffer.write_text("as DeepSpeed leaves it")
mapped, tracked = SharedMemory(create=True, size=4096), SharedMemory(create=True, size=4096)
resource_tracker.unregister(mapped._name, "shared_memory")  # as of a library that tracks nothing
tracked.close()  # its tracker removes it, if it may
instant = SharedMemory(create=True, size=4096)
resource_tracker.unregister(instant._name, "shared_memory")
instant.close()  # in use for less time than there is between two looks
before.write_text("what was there is not the launch's")
opened = Path(f"/dev/shm/optuna-dsat-test-{os.getpid()}")
if os.fork() == 0:
    opened.write_text("of a data loader's process")
    os._exit(0)
os.wait()
shared = [f"/dev/shm/{one.name}" for one in (mapped, tracked, instant)]
print(*made, buffer, *shared, opened, flush=True)
time.sleep(600)
"""


def test_what_a_killed_rank_leaves_is_removed(tmp_path: Path) -> None:
    mark = new_mark()
    record, before = tmp_path / "record", SHARED_MEMORY / f"optuna-dsat-test-before-{os.getpid()}"
    before.touch()
    agent = subprocess.Popen(
        [sys.executable, "-c", RANK, str(record), str(before)],
        env={**os.environ, MARK_ENV: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    launch = followed(tmp_path, agent, mark, leavings=record)
    assert agent.stdout is not None
    assert agent.stdin is not None
    with agent.stdin as go, agent.stdout as output:
        go.write("begin\n")
        go.flush()
        left = [Path(word) for word in output.readline().split()]
    assert len(left) == 7
    assert all(path.exists() for path in left)
    launch.end(Verdict(outcome=Outcome.PRUNED, message="enough"))
    now = 1.0
    while launch.gone_at is None:
        launch.advance(now)
        now += 1.0
    assert [path for path in left if path.exists()] == []
    assert not record.exists()
    assert before.exists()
    before.unlink()


def test_only_noted_temporary_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    record = tmp_path / "record"
    (tmp_path / "own").mkdir()
    made, own = tempfile.mkdtemp(), tempfile.mkdtemp(dir=tmp_path / "own")
    note(record, made)
    (tmp_path / "file").touch()
    record.write_text(record.read_text() + f'"relative"\n3\n"{tmp_path / "file"}"\n"cut of')
    assert remove_noted(record) == Counter(folders=1)
    assert not Path(made).exists()
    assert Path(own).exists()
    assert (tmp_path / "file").exists(), "no file but one in shared memory"
    assert not remove_noted(tmp_path / "none")


def test_a_buffer_of_the_same_name_that_is_in_use_stays(tmp_path: Path) -> None:
    """The next launch on the same port has mapped it."""
    record, path = tmp_path / "record", SHARED_MEMORY / f"optuna-dsat-test-{os.getpid()}"
    with path.open("wb+") as file:
        file.write(b"buffer")
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            record.write_text(json.dumps(str(path)))
            assert not remove_noted(record)
            assert path.exists()
    record.write_text(json.dumps(str(path)))
    assert remove_noted(record) == Counter(shared_memory=1)
    assert not path.exists()


def test_the_buffer_has_the_name_that_deepspeed_gives_it(tmp_path: Path) -> None:
    record = tmp_path / "record"
    note_shared_buffer(record, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, rank=3)
    (path,) = (json.loads(line) for line in record.read_text().splitlines())
    assert path == f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_29500_3"


TEMPORARY_FILES = """
import sys, tempfile
from pathlib import Path
from optuna_dsat.runtime.adapt.journal import note_created_files
note_created_files(Path(sys.argv[1]))
with tempfile.NamedTemporaryFile():
    pass
left = [tempfile.NamedTemporaryFile(delete=False), tempfile.NamedTemporaryFile(delete=False)]
print(left[0].name, left[1].name, tempfile.mkstemp(dir=Path.cwd())[1])
"""


def test_temporary_files_go_with_a_launch_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    record, environ = tmp_path / "record", {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    code = [sys.executable, "-c", TEMPORARY_FILES, str(record)]
    text = subprocess.run(code, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout
    first, second, own = map(Path, text.split())
    assert record.read_text().count('"file"') == 3, "one was removed by its maker"
    second.unlink()
    second.symlink_to(own)  # not a file of the launch
    assert remove_noted(record) == Counter(files=1)
    assert (first.exists(), second.is_symlink(), own.exists()) == (False, True, True)
