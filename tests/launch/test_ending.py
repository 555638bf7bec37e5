"""Launches end with SIGTERM and exit handlers; Python, and programs that ignore SIGTERM, are killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.machine.processes import end_with_descendants, kill_leftovers, new_mark
from optuna_dsat.launch.machine.tree import ProcessTree, end_launch
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent import processes
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.agent.processes import MARK_ENV, Ending, ProcessKey
from tests.harness.launches import request
from tests.harness.waits import assert_within, ended, wait_until

ROOT = Path(__file__).parents[2]

TRAP = """
made=$(mktemp)
trap 'rm "$made"; exit' TERM
(echo ready; exec sleep 600 >/dev/null) &
wait
"""

RANK = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1], "w").close())
program = subprocess.Popen(["sh", "-c", sys.argv[2]])
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    made = tmp_path / "temporary"
    made.mkdir()
    return made


Started = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def start(temporary: Path) -> Iterator[Started]:
    """Start a marked program that writes a line once it is ready; return it and its mark."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> tuple[subprocess.Popen[str], str]:
        mark = new_mark()
        environ = {**os.environ, MARK_ENV: mark, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process, mark

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def by_its_mark(_: subprocess.Popen[str], mark: str) -> None:
    kill_leftovers(mark)


def by_its_notes(process: subprocess.Popen[str], _: str) -> None:
    key = ProcessKey.of(process.pid)
    assert key is not None
    end_with_descendants([key])


def with_its_launch(process: subprocess.Popen[str], mark: str) -> None:
    end_launch(ProcessTree(process, mark=mark))


@pytest.mark.parametrize("end", [by_its_mark, by_its_notes, with_its_launch])
def test_a_program_below_a_rank_removes_what_it_made_and_the_rank_saves_nothing(
    start: Started, temporary: Path, end: Callable[[subprocess.Popen[str], str], None]
) -> None:
    rank, mark = start(sys.executable, "-c", RANK, str(temporary / "checkpoint"), TRAP)
    assert len(list(temporary.iterdir())) == 1
    end(rank, mark)
    assert rank.wait() == -signal.SIGKILL
    assert list(temporary.iterdir()) == []


def test_an_agent_that_ends_asks_what_is_below_it(start: Started, temporary: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "from optuna_dsat.runtime.agent.processes import adopt_orphans, end_children\n"
        "adopt_orphans()\n"
        "subprocess.run(['sh', '-c', sys.argv[1] + ' &'])\n"
        "sys.stdin.readline()\n"
        "end_children()\n"
    )
    agent, _ = start(sys.executable, "-c", code, f"( {TRAP} )")
    assert len(list(temporary.iterdir())) == 1
    agent.communicate("end\n")
    assert list(temporary.iterdir()) == []


def test_a_compiler_leaves_no_file(start: Started, temporary: Path) -> None:
    """Its ``cc*.s``; gcc removes this file itself when it, or the program it started, gets SIGTERM."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    line = f"echo ready; exec g++ -x c++ -c - -o {temporary}/made.o"
    _, mark = start("sh", "-c", line)
    wait_until(lambda: bool(list(temporary.glob("cc*.s"))), what="the compiler waits for its input")
    kill_leftovers(mark)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "script",
    [
        "trap '' TERM; echo ready; while :; do sleep 600; done",
        'trap \'exec "$0" -c "trap : TERM; sleep 600"\' TERM; sleep 600 >/dev/null & echo ready; wait',
        "again() { trap 'again & exit' TERM; sleep 600 & wait; }; echo ready; again >/dev/null",
        "echo ready; kill -STOP $$",
    ],
    ids=["deaf", "goes-on", "starts-itself-again", "stopped"],
)
def test_a_program_that_does_not_end_is_killed(start: Started, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PROGRAMS_S", 0.3)
    process, mark = start("bash", "-c", script)
    began = time.monotonic()
    kill_leftovers(mark)
    assert_within(time.monotonic() - began, 3.0)
    process.wait()
    assert kill_leftovers(mark) == ()


def test_an_interpreter_of_another_name_is_killed(start: Started, tmp_path: Path) -> None:
    """An interpreter is recognised by its library if it has one, else by its name."""
    name = tmp_path / "pypy-of-ours"
    shutil.copy(Path(sys.executable).resolve(), name)
    code = "signal.signal(signal.SIGTERM, lambda *_: exit(3)); print('ready', flush=True); time.sleep(600)"
    process, mark = start(str(name), "-c", f"import sys; sys.path[:] = {sys.path!r}; import signal, time; {code}")
    kill_leftovers(mark)
    assert process.wait() == -signal.SIGKILL


def test_an_ending_without_programs_takes_no_time(start: Started) -> None:
    process, _ = start(sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(600)")
    key = ProcessKey.of(process.pid)
    assert key is not None
    assert Ending().end([key]) == {key}
    assert process.wait() == -signal.SIGKILL


def test_what_imports_have_started_ends_with_the_process_that_launches_are_forked_from(tmp_path: Path) -> None:
    code = (
        "import subprocess\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "service = subprocess.Popen(['sleep', '600'], start_new_session=True, **quiet)\n"
        "daemon = subprocess.run(['env', '-i', 'sh', '-c', 'setsid sleep 600 >/dev/null 2>&1 & echo $!'],"
        " capture_output=True, text=True)\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{service.pid}} {{daemon.stdout}}')\n"
    )
    (tmp_path / "starts_services.py").write_text(code)
    launches = Forking(tmp_path / "warm.log", enabled=True, on_notice=print)
    try:
        launches.prepare(Preload(modules=("starts_services",)))
        launches._ready_server(
            {**os.environ, "PYTHONPATH": str(tmp_path), "DS_ACCELERATOR": "cpu"}, python=sys.executable
        )
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert [ended(pid) for pid in pids] == [False, False]
    finally:
        launches.close()
    assert [ended(pid) for pid in pids] == [True, True]


TRAIN = """
import atexit, os, sys, threading, time
import deepspeed, torch
from optuna_dsat.runtime import process
process.EXIT_LIMIT_S = 1.0  # of the five seconds that handlers are given
deepspeed.init_distributed()
rank = torch.distributed.get_rank()
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

def train():
    for _ in range(1000):
        engine.backward(engine(torch.randn(4, 4)).sum())
        engine.step()

def mark(name):
    open(f"{name}-{rank}", "w").close()
"""

HANDLERS = """
atexit.register(mark, 'atexit')
try:
    with torch.enable_grad():
        train()
finally:
    mark('finally')
"""


Run = Callable[[str], LaunchReport]


@pytest.fixture
def run(warm_launcher: TorchrunLauncher, tmp_path: Path) -> Run:
    """Launch a training with an ending, forked as most are."""

    def launched(ending: str) -> LaunchReport:
        script = tmp_path / "train.py"
        script.write_text(TRAIN + ending)
        (tmp_path / "user_config.json").write_text("{}")
        return follow(warm_launcher, request(tmp_path, launch_id=tmp_path.name, script=str(script), overlay={}))[1]

    return launched


@pytest.mark.torchrun
def test_finally_with_and_atexit_run(run: Run, tmp_path: Path) -> None:
    report = run(HANDLERS)
    assert report.outcome is Outcome.MEASURED, report.message
    marks = sorted(path.name for path in tmp_path.glob("[af]*-[01]"))
    assert marks == ["atexit-0", "atexit-1", "finally-0", "finally-1"]


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "ending",
    [
        "while True:\n    try:\n        train()\n    except BaseException:\n        pass\n",
        "try:\n    train()\nfinally:\n    raise RuntimeError('workers are gone')\n",
        "try:\n    train()\nfinally:\n    os._exit(7)\n",
        "worker = threading.Thread(target=train)\nworker.start()\nworker.join()\ntime.sleep(600)\n",
    ],
    ids=["swallowed", "raises", "hard exit", "thread"],
)
def test_no_ending_changes_the_outcome_or_takes_long(run: Run, ending: str) -> None:
    began = time.monotonic()
    report = run(ending)
    assert report.outcome is Outcome.MEASURED, report.message
    assert_within(report.exit_s, 12.0)
    assert_within(time.monotonic() - began, 120.0)
