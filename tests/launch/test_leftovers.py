"""Leftovers of killed tuners and launches are removed by the next start, and nothing else is removed."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
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
    remove_noted,
    removed_in_words,
)
from optuna_dsat.launch.machine.processes import new_mark
from optuna_dsat.launch.protocol import LaunchRequest, Verdict
from optuna_dsat.launch.run_directory import PreparedLaunch
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.adapt.journal import SHARED_MEMORY, note, note_shared_buffer
from optuna_dsat.runtime.agent.processes import MARK_ENV
from optuna_dsat.runtime.process_identity import process_space
from tests.harness import present
from tests.harness.launches import followed, request
from tests.harness.waits import ended, wait_until

TUNER = '''
import os, subprocess, sys
from pathlib import Path
from optuna_dsat.launch.machine.journal import TunerNotes
from optuna_dsat.launch.machine.processes import MARK_ENV, new_mark
from optuna_dsat.runtime.adapt.journal import note
made = Path(sys.argv[1])
notes = TunerNotes(made)
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
def environ(tmp_path: Path) -> dict[str, str]:
    return {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}


@pytest.fixture
def tuner(notes: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:  # noqa: ARG001 - where it has its journal
    with subprocess.Popen(
        [sys.executable, "-c", TUNER, str(tmp_path / "made")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def rank_of(tuner: subprocess.Popen[str]) -> tuple[int, list[Path]]:
    """Return the PID of a tuner's rank, and its files in shared memory: tracked and untracked."""
    pid, *shared = present(tuner.stdout).readline().split()
    return int(pid), [Path(item) for item in shared]


def test_what_a_killed_tuner_left_is_removed(
    tuner: subprocess.Popen[str], notes: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    (rank, shared), made = rank_of(tuner), tmp_path / "made"
    assert all(path.exists() for path in shared)
    remove_leftovers(environ)
    assert not ended(rank), "its tuner lives"
    assert (made / "temporary").is_dir()
    assert not any_gone()
    tuner.kill()
    tuner.wait()
    assert any_gone()
    with (made / "trial-0000" / f".command.json.{tuner.pid}").open("w") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        removed = remove_leftovers(environ)
    wait_until(lambda: ended(rank), what="its rank is gone")
    assert (removed["folders"], removed["partial_files"]) == (1, 1)
    assert "1 temporary folder, 1 partly written file" in removed_in_words(removed)
    wait_until(lambda: not any(path.exists() for path in shared), what="its shared memory is gone")
    assert not (made / "temporary").exists()
    left = sorted(path.name for path in (made / "trial-0000").iterdir())
    assert left == [f".command.json.{tuner.pid}", ".launch.json.1"], "others write them, one on another machine"
    assert not notes.exists()


def test_a_tuner_that_ends_by_itself_leaves_no_notes(tuner: subprocess.Popen[str], notes: Path) -> None:
    rank, shared = rank_of(tuner)
    os.kill(rank, 9)
    tuner.communicate()
    for path in shared:  # this tuner follows no launch, so it removes none of these
        path.unlink(missing_ok=True)
    assert not notes.exists()


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
    with gone_tuners() as result:
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


def test_folders_without_permissions_are_removed_at_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # other users cannot enter the folders above
    deep, user = Path("world", "work", "incompat", "volatile"), os.geteuid() or 65534
    deep.mkdir(parents=True)
    for path in (Path(), deep, *deep.parents[:-1]):
        os.chown(path, user, -1)
    for path in (deep, deep.parent):
        path.chmod(0)
    before = os.geteuid()
    os.seteuid(user)  # root needs no permissions
    journal._remove_folder(Path("world"))
    os.seteuid(before)
    assert not Path("world").exists()


def test_a_search_that_ends_leaves_no_lock_of_a_build(tmp_path: Path) -> None:
    (lock := tmp_path / "cpu_adam" / "lock").parent.mkdir()
    lock.touch()
    launcher = local_launcher(
        tmp_path / "out", devices=cpu_devices(1), base_env={"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    )
    launcher.close()
    assert not lock.exists()


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
    item, two = TunerNotes(tmp_path), TunerNotes(tmp_path)
    assert item.begin() != two.begin()
    assert item.begin().parent != two.begin().parent
    assert not any_gone()
    item.close()
    two.close()
    assert not notes.exists()


def test_a_launch_that_is_interrupted_as_it_starts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after its processes were started and before the launcher follows them."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(_: LaunchRequest, prepared: PreparedLaunch, **__: Any) -> None:
        (tmp_path / "temporary").mkdir()
        note(present(prepared.directory.leavings), str(tmp_path / "temporary"))
        started.append(subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: prepared.mark}))
        raise KeyboardInterrupt

    monkeypatch.setattr(MachineLaunch, "start", interrupted)
    launcher = local_launcher(tmp_path / "out", devices=cpu_devices(2))
    with pytest.raises(KeyboardInterrupt):
        launcher.start(request(tmp_path))
    assert started[0].wait() == -signal.SIGTERM
    assert not (tmp_path / "temporary").exists()
    assert launcher.free_slots == 2
    launcher.close()


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
    with present(agent.stdin) as go, present(agent.stdout) as output:
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
