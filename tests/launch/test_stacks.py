"""Whether silent ranks are stuck, and where they are."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from optuna_dsat.launch.stacks import StackWatch, describe_stacks, request_stacks
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.user_code import stacks_path
from tests.harness.commands import ROOT

RANK = """import sys, time
from pathlib import Path
from optuna_dsat.runtime.user_code import register_stacks
register_stacks(Path(sys.argv[1]), 0)
def first():
    print("ready", flush=True)
    sys.stdin.readline()
def second():
    print("moved", flush=True)
    sys.stdin.readline()
first()
second()
"""


@pytest.mark.parametrize(("moves", "unasked"), [(False, False), (True, False), (False, True)])
def test_ranks_stand_still_if_the_stacks_of_all_of_them_stay_the_same(
    tmp_path: Path, moves: bool, unasked: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        key = ProcessKey.of(process.pid)
        assert key is not None
        watch = StackWatch(tmp_path)
        ranks = dict.fromkeys(range(2 if unasked else 1), key)  # rank 1 has no file, and so cannot be asked

        def ask() -> Collection[int]:
            request_stacks(tmp_path, ranks)
            return ranks

        def look(now: float) -> bool:
            size = stacks_path(tmp_path, 0).stat().st_size
            result = watch.stand_still(now, silent_since=0.0, limit_s=30.0, ask=ask)
            deadline = time.monotonic() + 10.0
            while now in (15.0, 30.0) and stacks_path(tmp_path, 0).stat().st_size == size:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.1)
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
