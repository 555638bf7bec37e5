"""A command that leaves no process behind, whatever ends it or whoever started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.commands import ROOT
from tests.harness.workers import ended, wait_until

PARENT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.SIG_DFL)
child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $! $$; wait"], stdout=subprocess.PIPE, start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {child.stdout.readline().decode()}")
if sys.argv[2] == "ends":
    sys.exit(7)
time.sleep(600)
"""


def started(folder: Path, how: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Return a guarded command, and the processes that it has started: itself, a child and a grandchild."""
    noted = folder / "pids"
    words = ["-m", "optuna_dsat.launch.places.guarded", "", "-c", PARENT, str(noted), how]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdin=subprocess.PIPE)
    wait_until(lambda: noted.exists() and noted.read_text().endswith("\n"), what="it has started its child")
    return process, [int(word) for word in noted.read_text().split()]


@pytest.mark.parametrize("how", ["obeys", "stubborn"])
def test_it_ends_with_its_input_though_the_process_that_was_started_is_killed(tmp_path: Path, how: str) -> None:
    process, pids = started(tmp_path, how)
    assert len(pids) == 3
    assert not any(map(ended, pids))
    process.kill()  # as Ray does with the children of a worker that ends
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
    wait_until(lambda: all(map(ended, pids)), what="all of it is gone")


def test_what_it_leaves_behind_is_killed_and_its_exit_code_is_passed_on(tmp_path: Path) -> None:
    process, pids = started(tmp_path, "ends")
    assert process.wait(60) == 7
    assert all(map(ended, pids))
    assert process.stdin is not None
    process.stdin.close()
