from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.event_log import END_BYTES, START_BYTES, EventTail, LogLimit, dropped_in_words
from optuna_dsat.launch.machine.processes import (
    LaunchProcess,
    find_leftovers,
    find_marked,
    kill_leftovers,
    new_mark,
)
from optuna_dsat.launch.machine.tree import first_failure_code, read_exit_codes
from optuna_dsat.runtime.agent.operators import extensions_dir
from optuna_dsat.runtime.agent.processes import MARK_ENV, ProcessKey
from optuna_dsat.runtime.events import RankFinished, encode_event
from optuna_dsat.runtime.process_identity import process_space
from tests.harness.waits import wait_until

TREE = (
    "import subprocess, sys, time\n"
    "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
    "subprocess.Popen(sleep)\n"
    "subprocess.Popen(sleep, start_new_session=True)\n"
    "subprocess.run(['sh', '-c', 'sleep 600 & exit 0'], start_new_session=True)\n"  # re-parented
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def tree() -> Iterator[tuple[str, int]]:
    """A marked process with a child, a process in another session, and an orphan."""
    mark = new_mark()
    process = subprocess.Popen(
        [sys.executable, "-c", TREE], env={**os.environ, MARK_ENV: mark}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield mark, process.pid
    kill_leftovers(mark)
    process.wait()
    process.stdout.close()


def test_all_processes_of_a_launch_are_found_and_ended(tree: tuple[str, int]) -> None:
    mark, pid = tree
    result = {process.key.pid for process in find_marked(mark)}
    assert pid in result
    assert len(result) == 4
    assert set(kill_leftovers(mark)) == result
    assert find_marked(mark) == []
    assert kill_leftovers(mark) == ()


def test_a_launch_with_a_living_tuner_is_no_leftover(tree: tuple[str, int]) -> None:
    mark, _ = tree
    assert mark not in {process.mark for process in find_leftovers()}
    assert find_marked("another mark") == []


HERE = process_space()
BOOT, NAMESPACE = HERE.split(":")


@pytest.mark.parametrize(
    ("mark", "orphaned"),
    [
        (f"id:4194305:1:{HERE}", True),
        (f"id:{os.getpid()}:1:{HERE}", True),
        (new_mark(), False),
        (f"id:4194305:1:{BOOT}:{int(NAMESPACE) + 1}", False),
        (f"id:4194305:1:another-boot:{NAMESPACE}", False),
        ("id:4194305:1", False),
        ("", False),
        (f"id:x:y:{HERE}", False),
    ],
    ids=["gone", "another-of-its-number", "alive", "namespace", "boot", "no-place", "none", "no-numbers"],
)
def test_a_mark_tells_whether_its_tuner_lives(mark: str, orphaned: bool) -> None:
    assert LaunchProcess(ProcessKey(1, 1), mark).orphaned is orphaned


TUNER_OF_A_CONTAINER = """
import os, subprocess, sys
from optuna_dsat.launch.machine.processes import MARK_ENV, new_mark
rank = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: new_mark()})
print("started", flush=True)
sys.stdin.read()
print(rank.poll(), flush=True)
rank.kill()
rank.wait()
"""


def _marked_elsewhere() -> set[int]:
    return {process.key.pid for process in find_marked() if not process.mark.endswith(HERE)}


def test_launches_of_a_living_tuner_in_another_namespace_are_left_alone() -> None:
    """A container that shares the host: its processes are visible here, under other numbers than in its marks."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    with subprocess.Popen(
        [*unshare, sys.executable, "-c", TUNER_OF_A_CONTAINER],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "started\n"
        # For an instant after its start, the environment of a process is not visible.
        wait_until(lambda: bool(_marked_elsewhere()), what="its processes are visible from here")
        assert not _marked_elsewhere() & set(kill_leftovers())
        assert container.communicate()[0] == "None\n", "its rank still runs"


def test_a_process_key_is_not_fooled_by_a_reused_number() -> None:
    own = ProcessKey.of(os.getpid())
    assert own is not None
    assert own.alive
    assert not ProcessKey(own.pid, own.start_ticks - 1).alive
    assert ProcessKey.of(2**22 + 1) is None


def test_a_child_whose_parent_ended_at_the_fork_ends_too() -> None:
    """Its parent is another process by the time it checks."""
    code = (
        "import os, sys\n"
        "from optuna_dsat.runtime.agent.processes import die_with_parent\n"
        "die_with_parent(os.getppid() if sys.argv[1] == 'mine' else 4194305)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    codes = [
        subprocess.run([sys.executable, "-c", code, parent], env=environ, check=False).returncode
        for parent in ("mine", "gone")
    ]
    assert codes == [0, -9]


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen(["true"])
    wait_until(lambda: ProcessKey.of(process.pid) is None, what="it is dead")
    process.wait()


def test_events_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    events = [RankFinished(rank=0, time=float(n), reason="profile_done", steps=n) for n in range(3)]
    lines = [encode_event(event).encode() for event in events]
    path.write_bytes(lines[0] + b"\n" + lines[1][:10])
    assert tail.read() == [events[0]]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(lines[1][10:] + b"\nnot json\n\n" + lines[2] + b"\n")
    assert tail.read() == events[1:]
    assert tail.read() == []


def test_long_files_of_events_are_read_whole(tmp_path: Path) -> None:
    path, chunk = tmp_path / "rank0.jsonl", 2**12
    done = RankFinished(rank=0, time=3.0, reason="profile_done", steps=3)
    line = encode_event(done).encode() + b"\n"
    path.write_bytes(line * (3 * chunk // len(line)) + line[:20])
    tail = EventTail(path)
    tail._file._most_bytes = chunk
    assert len(tail.read()) == 3 * chunk // len(line)
    with path.open("ab") as file:
        file.write(line[20:] + b"\n" * chunk)
    assert tail.read() == [done]


def test_exit_codes_are_read_from_the_agent_s_record(tmp_path: Path) -> None:
    record = tmp_path / "agent.json"
    assert read_exit_codes(record) == {}
    assert first_failure_code(record) is None
    record.write_text(
        '{"failures": [{"rank": 0, "pid": 10, "exit_code": -9, "time": 2},'
        ' {"rank": 1, "pid": 11, "exit_code": 3, "time": 1}]}'
    )
    assert read_exit_codes(record) == {0: -9, 1: 3}
    assert read_exit_codes(record, without=[10]) == {1: 3}
    assert first_failure_code(record) == 3
    record.write_text(
        '{"failures": [{"rank": 0, "pid": 10, "exit_code": -15, "time": 1},'
        ' {"rank": 1, "pid": 11, "exit_code": 3, "time": 1}]}'
    )
    assert first_failure_code(record) == 3
    record.write_text(
        '{"failures": [{"rank": 0, "pid": 10, "exit_code": 1, "time": 1},'
        ' {"rank": 1, "pid": 11, "exit_code": -9, "time": 1}]}'
    )
    assert first_failure_code(record) == -9
    record.write_text("{")
    assert read_exit_codes(record) == {}


def test_torch_s_folder_of_extensions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extensions_dir({"TORCH_EXTENSIONS_DIR": "/a"}) == Path("/a")
    assert extensions_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/torch_extensions")
    assert extensions_dir({}) == Path.home() / ".cache/torch_extensions"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # of a container, where nobody has this number
    assert extensions_dir({}) == Path("/.cache/torch_extensions")


LIMIT = START_BYTES + END_BYTES
LINE = b"x" * 63 + b"\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.stdout.log"


def write_lines(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.write(LINE * (size // len(LINE)))


def test_a_growing_log_keeps_its_beginning_and_end_within_the_limit(log: Path) -> None:
    limit = LogLimit([log])
    log.write_bytes(b"first line\n")
    for second in range(8):
        write_lines(log, 16 * 2**20)
        limit.check(float(second))
        allocated = log.stat().st_blocks * 512
        assert allocated <= LIMIT + 2**20
    size = log.stat().st_size
    with log.open("ab") as file:  # the writer's offset is unchanged
        file.write(b"last line\n")
    limit.close()
    text = log.read_bytes()
    assert text.startswith(b"first line\n" + LINE)
    assert text.endswith(LINE + b"last line\n")
    assert dropped_in_words(size + len(b"last line\n") - LIMIT).encode() in text
    assert b"\x00" not in text
    assert len(text) < LIMIT + 200


def test_a_log_within_the_limit_is_left_as_it_is(log: Path) -> None:
    write_lines(log, LIMIT)
    before = log.read_bytes()
    limit = LogLimit([log, log.with_name("absent.log")])
    limit.check(0.0)
    limit.close()
    assert log.read_bytes() == before


def test_a_log_that_is_a_line_longer_than_the_limit_does_not_grow(log: Path) -> None:
    """It grew until the disk was full."""
    write_lines(log, LIMIT + len(LINE))
    limit = LogLimit([log])
    limit.close()
    assert log.stat().st_size == LIMIT + len(LINE)
