"""Files of launches in shared memory are known while they live, and files of others are never attributed to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.machine import shared_memory
from optuna_dsat.launch.machine.journal import remove_leftovers, remove_noted
from optuna_dsat.launch.machine.processes import new_mark
from optuna_dsat.launch.machine.shared_memory import SharedMemoryWatch, shared_memory_of
from optuna_dsat.runtime.adapt.journal import SHARED_MEMORY
from optuna_dsat.runtime.agent.processes import MARK_ENV
from tests.harness.launches import followed, processes_of
from tests.harness.waits import wait_until

MAPS = """
import mmap, sys, time
files = []
for path in sys.argv[1:]:
    file = open(path, "ab+")
    if not file.tell():
        file.truncate(4096)
    files.append((file, mmap.mmap(file.fileno(), 0)))
print("mapped", flush=True)
time.sleep(600)
"""
"""Maps files; creates missing files."""


@pytest.fixture
def names() -> Iterator[list[Path]]:
    """Return two paths in shared memory."""
    paths = [SHARED_MEMORY / f"nccl-test-{uuid.uuid4().hex}" for _ in range(2)]
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def mapping(*paths: Path, mark: str = "") -> subprocess.Popen[str]:
    """Start a process that has mapped the files when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAPS, *map(str, paths)],
        env={**os.environ, **({MARK_ENV: mark} if mark else {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "mapped\n"
    return process


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def old(path: Path) -> None:
    """Create a file that is an hour old."""
    path.write_bytes(b"data" * 1024)
    os.utime(path, (time.time() - 3600, time.time() - 3600))


def test_what_a_process_made_that_others_killed_is_removed_and_a_users_own_file_stays(
    tmp_path: Path, names: list[Path]
) -> None:
    """A data set that a script maps from shared memory was removed with the launch."""
    (made, users), mark = names, new_mark()
    old(users)
    agent = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: mark}, text=True)
    launch = followed(tmp_path, agent, mark, leavings=tmp_path / "record")
    rank = mapping(made, users, mark=mark)
    processes_of(launch)._tree.add_rank(0, rank.pid)
    launch.advance(1.0)
    assert json.loads((tmp_path / "record").read_text()) == {"path": str(made), "inode": made.stat().st_ino}
    killed(rank)  # not by one of our tuners
    killed(agent)
    now = 1.0
    while launch.gone_at is None:
        now += 0.01
        launch.advance(now)
    assert not made.exists()
    assert users.exists()


def test_what_was_noted_is_removed_after_the_tuner_was_killed_unless_another_has_the_name(
    tmp_path: Path, names: list[Path]
) -> None:
    record, (made, again) = tmp_path / "record", names
    watch = SharedMemoryWatch(lambda: (rank.pid,), record=record)
    rank = mapping(made, again)
    watch.check(0.0)
    assert watch.found == {made, again}
    assert remove_noted(record) == Counter(), "they are in use"
    watch = SharedMemoryWatch(lambda: (), record=record)
    lines = [json.dumps({"path": str(path), "inode": path.stat().st_ino}) for path in names]
    killed(rank)
    again.unlink()
    keep = tmp_path / "keep"  # so that the next file gets another inode
    keep.touch()
    again.write_bytes(b"another's")
    record.write_text("\n".join([*lines, '{"path": 3, "inode": 1}', '{"path": "/dev/shm/none", "inode": 1}', "{"]))
    assert remove_noted(record) == Counter(shared_memory=1)
    assert not made.exists()
    assert again.exists()


def test_a_file_that_another_process_made_is_not_taken_for_the_launchs(tmp_path: Path) -> None:
    """Data that appear in shared memory while a rank runs, and that it maps, were deleted with the launch."""
    data = SHARED_MEMORY / f"data-{uuid.uuid4().hex}"
    watch = SharedMemoryWatch(lambda: (rank.pid,), record=tmp_path / "record")
    data.write_bytes(b"data" * 1024)
    rank = mapping(data)
    try:
        watch.check(0.0)
        assert watch.found == frozenset()
    finally:
        killed(rank)
        data.unlink()


def test_a_name_that_was_there_before_is_left_whatever_its_file(tmp_path: Path, names: list[Path]) -> None:
    replaced, other = names
    old(replaced)
    watch = SharedMemoryWatch(lambda: (rank.pid,), record=tmp_path / "record")
    other.write_bytes(b"new" * 1024)
    other.rename(replaced)  # as done by a script that replaces its data
    rank = mapping(replaced)
    try:
        watch.check(0.0)
        assert watch.found == frozenset()
    finally:
        killed(rank)


@pytest.mark.usefixtures("notes")
def test_a_leftover_of_a_killed_tuner_takes_no_older_file_with_it(tmp_path: Path, names: list[Path]) -> None:
    made, users = names
    old(users)
    gone = subprocess.Popen(["true"])
    gone.wait()
    text, _, tuner = new_mark().partition(":")
    _, start, place = tuner.split(":", 2)
    rank = mapping(made, users, mark=f"{text}:{gone.pid}:{start}:{place}")
    remove_leftovers({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    rank.wait()
    wait_until(lambda: not made.exists(), what="what it made is removed")
    assert users.exists()


def test_a_file_of_torch_is_known_by_its_name_alone(tmp_path: Path) -> None:
    mine = SHARED_MEMORY / f"torch_{os.getpid()}_12345_0"
    others = SHARED_MEMORY / "torch_1_12345_0"
    watch = SharedMemoryWatch(lambda: (os.getpid(),), record=tmp_path / "record")
    try:
        mine.touch()
        others.touch()
        watch.check(0.0)
        assert watch.found == {mine}
    finally:
        mine.unlink()
        others.unlink()


def test_processes_are_not_looked_at_again_and_again(names: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    files, known = shared_memory._files, {path.name for path in names}  # other tests make files, too
    monkeypatch.setattr(shared_memory, "_files", lambda: frozenset(file for file in files() if file[0] in known))

    def find() -> tuple[int, ...]:
        looks.append(now)
        return ()

    watch = SharedMemoryWatch(find)
    for tick in range(1000):
        now = tick * 0.02
        if tick == 100:
            names[0].touch()  # a file of another owner, now and later
        watch.check(now)
    assert looks[0] == 2.0
    assert 3 <= len(looks) <= 8
    assert not shared_memory_of([os.getpid()]) & set(names)
