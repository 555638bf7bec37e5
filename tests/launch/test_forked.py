from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optuna_dsat.runtime.agent.forked import resolve_python_path


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
