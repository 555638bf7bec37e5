"""Forked launches: what a child inherits, and a fork server that is stopped, as after SIGSTOP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.launch.machine.processes import exit_code_of
from optuna_dsat.launch.run_directory import PreparedLaunch, RunDirectory
from optuna_dsat.launch.warm import server as warm
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.launch.warm.server import WarmAgent, WarmUnavailableError
from optuna_dsat.runtime.agent.forked import resolve_python_path
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.agent.processes import ProcessKey
from tests.harness.waits import wait_until


def path_of_an_interpreter(python_path: str, cwd: Path) -> list[str]:
    code = "import json, sys; print(json.dumps(sys.path))"
    environ = {**os.environ, "PYTHONPATH": python_path}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: list[str] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("python_path", ["src:.:/absolute", ":src", "", ".:../.."])
def test_relative_entries_of_the_path_mean_what_they_mean_to_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str
) -> None:
    (folder := tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", path_of_an_interpreter(python_path, Path("/")))
    resolve_python_path(python_path)
    assert sys.path == path_of_an_interpreter(python_path, folder)


DROPPED_BY_THE_PARENT = """
import gc, os
from optuna_dsat.runtime.agent.forked import ParentState, fork_child
state = ParentState.capture(without=(), started_with=os.environ)
gc.disable()
dropped = [open(os.devnull)]
dropped.append(dropped)
del dropped  # a cycle, which still holds the file

def run(reopened):
    state.restore(reopened=reopened)
    reads, writes = os.pipe()
    gc.collect()
    os.write(writes, b"whole")
    os._exit(os.read(reads, 5) != b"whole")

_, status = os.waitpid(fork_child(run), 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


def test_what_the_parent_has_dropped_closes_nothing_in_a_child() -> None:
    done = subprocess.run([sys.executable, "-c", DROPPED_BY_THE_PARENT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


INTERRUPTED = """
import os, signal
from optuna_dsat.runtime.agent.forked import fork_child
signal.signal(signal.SIGINT, signal.default_int_handler)
_, status = os.waitpid(fork_child(lambda _: signal.raise_signal(signal.SIGINT)), 0)
raise SystemExit(os.waitstatus_to_exitcode(status) != -signal.SIGINT)
"""


def test_a_child_that_is_interrupted_ends_by_that_signal() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "KeyboardInterrupt" in done.stderr


ENVIRON = {**os.environ, "DS_ACCELERATOR": "cpu"}


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Forking]:
    made = Forking(tmp_path / "warm.log", enabled=True, on_notice=print)
    made.prepare(Preload(modules=("colorsys",)))  # nothing that takes long
    made._ready_server(ENVIRON, python=sys.executable)
    yield made
    made.close()


def test_the_end_of_an_agent_is_known_without_it(launches: Forking, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = launches._server
    with subprocess.Popen(["sh", "-c", "read go; exit 3"], stdin=subprocess.PIPE) as ended:
        monkeypatch.setattr(server, "await_start", lambda _: ended.pid)
        agent = WarmAgent(server, "trial-0000", Preload())
        key = ProcessKey.of(ended.pid)
        assert key is not None
        assert exit_code_of(key) is None
        assert ended.stdin is not None
        ended.stdin.close()
        wait_until(lambda: exit_code_of(key) == 3, what="it has ended")
        assert agent.poll() is None, "the server may still report it"
        monkeypatch.setattr(warm, "_REPORT_LIMIT_S", 0.0)
        assert agent.poll() == 3
    process = server.process
    launches.begin(ENVIRON, python=sys.executable)
    assert process.poll() == -signal.SIGKILL
    assert launches._server is not server


def order(tmp_path: Path, **variables: str) -> PreparedLaunch:
    return PreparedLaunch(
        python=sys.executable,
        launch_id="trial-0000",
        mark="",
        shown=(),
        arguments=(),
        environ={**ENVIRON, **variables},
        cwd=str(tmp_path),
        directory=RunDirectory.create(tmp_path, "trial-0000"),
    )


def test_a_launch_in_another_environment_is_left_to_plain_torchrun(
    launches: Forking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launches.start(order(tmp_path, SOMETHING="else")) is None
    assert capsys.readouterr().out.strip() == (
        "Launches run by plain torchrun, which takes seconds longer for each: "
        "the environment of this launch differs in SOMETHING."
    )


def test_variables_of_another_launcher_that_launches_get_later_are_unknown_to_imports(
    launches: Forking, tmp_path: Path
) -> None:
    before = launches._server
    agent = launches.fork(order(tmp_path, SLURM_PROCID="$RANK"))
    wait_until(lambda: agent.poll() is not None, what="it ends without a description of its launch")
    after = launches._server
    assert before is not after is not None
    assert b"SLURM_PROCID" not in Path(f"/proc/{after.process.pid}/environ").read_bytes()
    launches.fork(order(tmp_path, SLURM_PROCID="$RANK"))
    assert launches._server is after


def test_one_that_leaves_an_order_unanswered_is_ended(
    launches: Forking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_ANSWER_LIMIT_S", 0.3)
    server: Any = launches._server
    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(WarmUnavailableError, match=r"gave no answer in 0.3 s"):
        launches.fork(order(tmp_path))
    assert server.process.poll() == -signal.SIGKILL, "or it would fork, once it goes on"
