"""A silent launch lives while it works (time is simulated), and ranks whose stacks stay the same are stuck."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil
import pytest

from optuna_dsat.launch.machine.host import MAX_STALL_LIMITS, ActivityMonitor, ProcessUsage, read_usage
from optuna_dsat.launch.machine.processes import kill_leftovers, new_mark
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.stacks import StackWatch, describe_stacks, request_stacks
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.processes import MARK_ENV, ProcessKey
from optuna_dsat.runtime.events import Event, RankStarted, encode_event
from optuna_dsat.runtime.user_code import stacks_path
from tests.harness.commands import ROOT
from tests.harness.events import step_of
from tests.harness.launches import followed
from tests.harness.waits import wait_until

MIB = 2**20
RANK, COMPILER = ProcessKey(7, 1), ProcessKey(8, 1)
LIMIT_S = 40.0
"""Readings are 5 seconds apart: a busy process uses a quarter of a second of CPU time between them."""


def watch() -> ActivityMonitor:
    return ActivityMonitor(limit_s=LIMIT_S, started=0.0)


def look(
    watched: ActivityMonitor,
    now: float,
    readings: dict[ProcessKey, ProcessUsage],
    *,
    trained: bool = False,
    last_event: float = 0.0,
) -> None:
    watched.update(readings, now, last_event=last_event, ranks={RANK}, trained=trained)


@pytest.mark.parametrize(
    ("key", "done", "before_training", "after"),
    [
        (RANK, ProcessUsage(cpu_s=10.0, ended_cpu_s=1.0, io_bytes=MIB), False, False),  # nothing since the last reading
        (RANK, ProcessUsage(cpu_s=10.3, ended_cpu_s=1.0, io_bytes=MIB), True, False),
        (RANK, ProcessUsage(cpu_s=10.0, ended_cpu_s=1.0, io_bytes=MIB + 4096), False, False),
        (RANK, ProcessUsage(cpu_s=10.0, ended_cpu_s=1.0, io_bytes=3 * MIB), True, False),
        (RANK, ProcessUsage(cpu_s=10.0, ended_cpu_s=1.3, io_bytes=MIB), True, True),
        (COMPILER, ProcessUsage(cpu_s=0.3), True, True),
        (COMPILER, ProcessUsage(cpu_s=0.1), False, False),
        (COMPILER, ProcessUsage(ended_cpu_s=0.3), True, True),
        (COMPILER, ProcessUsage(io_bytes=MIB), True, True),
    ],
)
def test_work_is_more_than_a_trickle_and_a_rank_that_trains_may_spin(
    key: ProcessKey, done: ProcessUsage, before_training: bool, after: bool
) -> None:
    for trained, works in ((False, before_training), (True, after)):
        watched = watch()
        before = ProcessUsage(cpu_s=10.0, ended_cpu_s=1.0, io_bytes=MIB)
        look(watched, 5.0, {RANK: before}, trained=trained)
        assert watched.last_work is None, "one look compares with nothing"
        look(watched, 10.0, {RANK: before, key: done}, trained=trained)
        assert watched.last_work == (10.0 if works else None)


def test_a_process_that_has_gone_is_no_work() -> None:
    watched = watch()
    look(watched, 5.0, {RANK: ProcessUsage(cpu_s=10.0), COMPILER: ProcessUsage(cpu_s=99.0)})
    look(watched, 10.0, {RANK: ProcessUsage(cpu_s=10.0)})
    look(watched, 15.0, {})
    assert watched.last_work is None


def test_what_was_done_before_the_silence_is_no_work_in_it() -> None:
    watched = watch()
    look(watched, 5.0, {RANK: ProcessUsage(cpu_s=1.0)})
    look(watched, 60.0, {RANK: ProcessUsage(cpu_s=50.0)}, last_event=55.0)
    assert watched.last_work is None
    look(watched, 65.0, {RANK: ProcessUsage(cpu_s=51.0)}, last_event=55.0)
    assert watched.last_work == 65.0


def test_looks_are_taken_in_silence_alone_and_some_seconds_apart() -> None:
    watched = watch()
    assert not watched.is_due(4.0, last_event=0.0)
    assert watched.is_due(5.0, last_event=0.0)
    look(watched, 5.0, {})
    assert not watched.is_due(9.0, last_event=0.0)
    assert not watched.is_due(12.0, last_event=8.0)
    assert ActivityMonitor(limit_s=4.0, started=0.0).is_due(1.0, last_event=0.0), "a short limit has its looks, too"


def test_work_without_an_event_counts_for_some_limits_alone() -> None:
    watched, worked_s = watch(), 0.0
    assert watched.last_activity(3.0) == 3.0
    for now in range(5, 1000, 5):
        look(watched, now, {RANK: ProcessUsage(cpu_s=now)})
        if now - watched.last_activity(0.0) <= LIMIT_S:
            worked_s = now
    assert worked_s == MAX_STALL_LIMITS * LIMIT_S
    assert watched.last_activity(990.0) == 995.0, "an event starts the count anew"


def test_readings_are_taken_of_living_processes_and_of_what_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))']); print('', flush=True)"
    code += "; input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    key = ProcessKey.of(process.pid)
    assert key is not None
    gone = ProcessKey(process.pid, key.start_ticks + 1)
    result = read_usage([key, gone, ProcessKey(2**22 + 1, 0)])
    assert list(result) == [key]
    assert result[key].ended_cpu_s > 0.0
    assert result[key].io_bytes > 4096
    monkeypatch.delattr(psutil.Process, "io_counters")  # as psutil has none on a system without /proc/PID/io
    assert read_usage([key])[key].io_bytes == 0
    process.communicate("\n")
    assert read_usage([key]) == {}


SPIN = "while :; do :; done"


class SilentRankBench:
    """A rank below an agent, both of them shells, followed as a launch with a simulated clock."""

    def __init__(self, folder: Path, script: str, *, stall_s: float = 4.0, timeout_s: float | None = None) -> None:
        self.mark = new_mark()
        environ = {**os.environ, MARK_ENV: self.mark, "RANK_SCRIPT": script}
        self.agent = subprocess.Popen(["/bin/sh", "-c", '/bin/sh -c "$RANK_SCRIPT" & wait'], env=environ)
        self.rank = child_of(self.agent.pid)
        self.launch = followed(folder, self.agent, self.mark, stall_s=stall_s, timeout_s=timeout_s)
        self.write(RankStarted(rank=0, time=1.0, local_rank=0, world_size=1, pid=self.rank.pid))

    def write(self, event: Event) -> None:
        with self.launch.directory.events(0).open("a", encoding="utf-8") as file:
            file.write(encode_event(event) + "\n")

    def pass_time(self, busy: psutil.Process | None) -> str:
        """Let six seconds pass, with a little CPU time of the busy process in each; return the stall's message."""
        for now in range(7):
            if busy is not None:
                target_s = cpu_s(busy) + 0.07
                wait_until(lambda: cpu_s(busy) >= target_s, what="it computes")  # noqa: B023 - called at once
            self.launch.advance(float(now))
            if self.launch.stop_reason is not None:
                assert self.launch.stop_reason.outcome is Outcome.STALLED
                return self.launch.stop_reason.message
        return ""


WAITING = """import sys, time
from pathlib import Path
from optuna_dsat.runtime.user_code import register_stacks
while not Path(sys.argv[1]).is_dir():  # the run directory may be made after the start
    time.sleep(0.01)
register_stacks(Path(sys.argv[1]), 0)
time.sleep(600)
"""


@pytest.mark.parametrize(("longest_start_s", "stalled"), [(2.0, True), (30.0, False)])
def test_a_rank_that_stands_still_before_its_first_step_is_measured_by_earlier_starts(
    tmp_path: Path, longest_start_s: float, stalled: bool
) -> None:
    folder = RunDirectory(tmp_path / "trial-0000").log_dir
    script = f"exec {shlex.join([sys.executable, '-c', WAITING, str(folder)])}"
    rank = SilentRankBench(tmp_path, script, stall_s=600.0)
    try:
        rank.launch.longest_start_s = longest_start_s
        path = stacks_path(folder, 0)
        wait_until(path.exists, what="the rank can be asked for its stacks")
        for now in (1.0, 16.0, 31.0, 34.0):
            written = stacks_in(path)
            rank.launch.advance(now)
            if stalled and now in (16.0, 31.0):
                wait_until(lambda: stacks_in(path) > written, what="the stacks are written")  # noqa: B023 - at once
        stop = rank.launch.stop_reason
        assert (stop is not None and stop.outcome is Outcome.STALLED) is stalled
    finally:
        kill_leftovers(rank.mark)
        rank.agent.wait()


def stacks_in(path: Path) -> int:
    """Return how often the stacks of a script were written to their ends."""
    return path.read_text(encoding="ascii").count(" in <module>\n")


def child_of(pid: int) -> psutil.Process:
    wait_until(lambda: bool(psutil.Process(pid).children()), what="it has a child")
    return psutil.Process(pid).children()[0]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., SilentRankBench]]:
    made: list[SilentRankBench] = []

    def make(script: str, **limits: float) -> SilentRankBench:
        made.append(SilentRankBench(tmp_path, script, **limits))
        return made[-1]

    yield make
    for item in made:
        kill_leftovers(item.mark)
        item.agent.wait()


def test_a_rank_that_sleeps_is_stalled_and_the_message_says_after_what(bench: Callable[..., SilentRankBench]) -> None:
    message = bench("exec sleep 600").pass_time(None)
    assert message.startswith("no activity from any rank for 4 s (--stall-timeout); no step was finished")
    assert message.endswith("last seen: the start of the script (rank 0) 5 s ago")


def test_a_launch_that_takes_longer_than_its_limit_is_ended(bench: Callable[..., SilentRankBench]) -> None:
    launch = bench("exec sleep 600", timeout_s=2.0).launch
    launch.advance(2.0)
    assert launch.stop_reason is None
    launch.advance(2.5)
    assert launch.stop_reason is not None
    assert launch.stop_reason.outcome is Outcome.TIMEOUT
    assert launch.stop_reason.message == "longer than the limit of 2 s (--trial-timeout); no step was finished"


def test_a_rank_that_computes_before_its_first_step_is_alive(bench: Callable[..., SilentRankBench]) -> None:
    computing = bench(SPIN)
    assert computing.pass_time(computing.rank) == ""


def test_a_rank_that_spins_after_its_first_step_is_stalled(bench: Callable[..., SilentRankBench]) -> None:
    spinning = bench(SPIN)
    spinning.write(step_of(step=1, time=2.0))
    message = spinning.pass_time(spinning.rank)
    assert "the last step was 1 of 3; last seen: a step (rank 0)" in message


def test_a_compiler_below_a_rank_is_alive_after_the_first_step_too(bench: Callable[..., SilentRankBench]) -> None:
    compiling = bench(f"({SPIN}) & wait")
    compiling.write(step_of(step=1, time=2.0))
    assert compiling.pass_time(child_of(compiling.rank.pid)) == ""


SCRIPT = """import sys, time
from pathlib import Path
from optuna_dsat.runtime.user_code import register_stacks
register_stacks(Path(sys.argv[1]), 0)
def first():
    print("ready", flush=True), sys.stdin.readline()  # in a line, which the stacks name
def second():
    print("moved", flush=True), sys.stdin.readline()
first()
second()
"""


@pytest.mark.parametrize(("moves", "unasked"), [(False, False), (True, False), (False, True)])
def test_ranks_stand_still_if_the_stacks_of_all_of_them_stay_the_same(
    tmp_path: Path, moves: bool, unasked: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        key = ProcessKey.of(process.pid)
        assert key is not None
        watch, path = StackWatch(tmp_path), stacks_path(tmp_path, 0)
        ranks = dict.fromkeys(range(2 if unasked else 1), key)  # rank 1 has no file, and so cannot be asked

        def ask() -> Collection[int]:
            request_stacks(tmp_path, ranks)
            return ranks

        def look(now: float) -> bool:
            written = stacks_in(path)
            result = watch.stand_still(now, silent_since=0.0, limit_s=30.0, ask=ask)
            if now in (15.0, 30.0):
                wait_until(lambda: stacks_in(path) > written, what="the stacks are written")
            return result

        assert not any(map(look, (1.0, 15.0)))
        if moves:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "moved\n"
        assert [look(30.0), look(33.0)] == [False, not (moves or unasked)]
        process.kill()


def test_ranks_that_cannot_be_asked_do_not_stand_still(tmp_path: Path) -> None:
    watch = StackWatch(tmp_path)
    assert not any(watch.stand_still(now, silent_since=0.0, limit_s=2.0, ask=set) for now in (1.0, 2.0, 9.0))
    assert watch.taken() == {}


def test_the_collective_and_the_line_of_the_script_are_named() -> None:
    waits = """Current thread 0x1 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5 in barrier
  File "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/u/train.py", line 20 in <module>
"""
    elsewhere = """Thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait

Current thread 0x1 (most recent call first):
  File "/home/u/train.py", line 9 in preview
"""
    assert describe_stacks({1: waits, 0: elsewhere}) == (
        "rank 0 is in preview at line 9 of train.py; rank 1 waits in barrier at line 20 of train.py"
    )
