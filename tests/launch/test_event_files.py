"""Files of events that a script writes into, too: what no runtime writes is not read, and ends the launch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from optuna_dsat.cluster.node_files import GrowingFile
from optuna_dsat.launch.classify import classify
from optuna_dsat.launch.event_log import EventTail
from optuna_dsat.launch.processes import MARK_ENV, new_mark
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.running import RunningLaunch
from optuna_dsat.launch.slots import SlotLease
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import RankFinished, RankStarted, encode_event
from tests.harness.launches import request

STARTED = RankStarted(rank=0, time=1.0, local_rank=0, world_size=1, pid=os.getpid(), host="h")
DONE = RankFinished(rank=0, time=3.0, reason="profile_done", steps=3)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def huge(path: Path) -> None:
    os.truncate(path, 10 * 2**30)  # takes no room on the disk


def endless_line(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 5 * 2**20)


def long_line(path: Path) -> None:
    append(path, b" " * (5 * 2**20) + encode_event(DONE).encode() + b"\n")


def noise(path: Path) -> None:
    append(path, b"x\n" * 20_000)


FLOODS: dict[Callable[[Path], None], str] = {
    huge: "over 64 MiB",
    endless_line: "a line of over 4 MiB",
    long_line: "a line of over 4 MiB",
    noise: "over 10000 lines that are no events",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_what_no_runtime_writes_is_read_no_further(tmp_path: Path, flood: Callable[[Path], None]) -> None:
    path = tmp_path / "rank0.jsonl"
    append(path, encode_event(STARTED).encode() + b"\n")
    tail = EventTail(path)
    assert tail.read() == [STARTED]
    assert not tail.flooded
    flood(path)
    assert tail.read() == []
    assert tail.flooded == FLOODS[flood]
    append(path, b"\n" + encode_event(DONE).encode() + b"\n")
    assert tail.read() == []


def test_a_script_may_put_anything_in_the_place_of_a_file_of_events(tmp_path: Path) -> None:
    folder, pipe, none = tmp_path / "folder", tmp_path / "pipe", tmp_path / "none"
    folder.mkdir()
    (folder / "file").touch()
    os.mkfifo(pipe)
    for path in (folder, pipe, none):
        assert EventTail(path).read() == []
    tail = EventTail(folder)
    tail.read()
    assert tail.flooded == "no file to be read (it is no regular file)"


def test_long_files_of_events_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    line = encode_event(DONE).encode() + b"\n"
    append(path, line * (3 * 2**20 // len(line)) + line[:20])
    tail = EventTail(path)
    assert len(tail.read()) == 3 * 2**20 // len(line)
    append(path, line[20:] + b"\n" * 2**20)
    assert tail.read() == [DONE]
    assert (tail.dropped, tail.flooded) == (0, "")


def launch_of(folder: Path, agent: subprocess.Popen[bytes], mark: str) -> RunningLaunch:
    return RunningLaunch(
        request=request(folder, slots=1),
        directory=RunDirectory.create(folder, "trial-0000"),
        lease=SlotLease(devices=(), baseline_bytes={}),
        mark=mark,
        agent=agent,
        command=(),
        started=0.0,
        started_unix=0.0,
        oom_kills_before=None,
    )


def followed(launch: RunningLaunch) -> None:
    now = 1.0
    while launch.gone_at is None:
        launch.advance(now)
        now += 0.01


@pytest.mark.parametrize("command", [["sleep", "600"], ["true"]])
def test_a_launch_whose_script_floods_them_ends_as_a_script_error(tmp_path: Path, command: list[str]) -> None:
    mark = new_mark()
    agent = subprocess.Popen(command, env={**os.environ, MARK_ENV: mark})
    launch = launch_of(tmp_path, agent, mark)
    path = launch.directory.events(0)
    path.touch()
    huge(path)
    if command == ["true"]:
        agent.wait()  # the flood is found when the launch is over
    followed(launch)
    verdict = classify(launch.facts(None))
    assert verdict.outcome is Outcome.SCRIPT_ERROR
    assert verdict.message.startswith("rank 0 wrote over 64 MiB into its file of events")


def test_what_is_written_after_the_last_step_is_no_matter(tmp_path: Path) -> None:
    mark = new_mark()
    agent = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: mark})
    launch = launch_of(tmp_path, agent, mark)
    path = launch.directory.events(0)
    append(path, encode_event(DONE).encode() + b"\n")
    assert launch.advance(1.0) == [DONE]
    huge(path)
    followed(launch)
    assert launch.facts(None).stop is None


def test_an_endless_line_on_a_node_reaches_the_head_as_one_that_is_too_long(tmp_path: Path) -> None:
    path, copy = tmp_path / "rank0.jsonl", tmp_path / "copy.jsonl"
    path.touch()
    os.truncate(path, 20 * 2**20)
    grown = GrowingFile(path)
    lines: list[bytes] = []
    while not lines:
        lines = grown.read_lines()
    assert grown.sent_bytes < 5 * 2**20
    copy.write_bytes(lines[0] + b"\n")
    tail = EventTail(copy)
    assert tail.read() == []
    assert tail.flooded == "a line of over 4 MiB"
