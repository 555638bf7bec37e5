"""How launches on GPUs end before their time, and that nothing of them stays on the GPUs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cuda.machine import Machine
from tests.cuda.tuning import Launched, Search, left_nothing, slow_search

PATIENCE_S = 120.0


def wait_for(happened: Callable[[], bool], search: Search) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert search.process.poll() is None, search.finish().errors
        assert time.monotonic() < deadline, [launch.name for launch in search.launches]
        time.sleep(0.05)


def alive(launch: Launched) -> list[int]:
    """Return the processes of a launch's ranks that still run; who would reap orphans may take his time."""
    processes = {process.pid: process for process in psutil.process_iter(["status"])}
    pids = [rank["pid"] for rank in launch.ranks if rank["pid"] in processes]
    return [pid for pid in pids if processes[pid].info["status"] != psutil.STATUS_ZOMBIE]


def running_trial(search: Search) -> Launched:
    """Wait for a trial whose two ranks have measured a step; return it."""

    def measures() -> list[Launched]:
        return [trial for trial in search.trials if len({e["rank"] for e in trial.events("step_measured")}) == 2]

    wait_for(lambda: bool(measures()), search)
    return measures()[0]


@pytest.mark.parametrize("launcher", ["torchrun", "warm"])
def test_a_rank_that_is_killed_frees_its_gpus(machine: Machine, tmp_path: Path, launcher: str) -> None:
    search = slow_search(machine, tmp_path, "--launcher", launcher, "--max-retries", "0", seconds=0.5)
    trial = running_trial(search)
    killed = trial.ranks[1]["pid"]
    use = machine.use()
    assert use[1].processes.keys() == {killed}
    os.kill(killed, signal.SIGKILL)
    search.finish()
    first, *others = (Launched(trial.folder) for trial in search.trials)
    assert first.report["outcome"] not in ("measured", "out_of_memory", "invalid_config"), first.report
    assert "SIGKILL" in first.report["message"] or "signal 9" in first.report["message"], first.report
    assert [item.report["outcome"] for item in others] == ["measured"] * 2  # it was launched again, as nobody's fault
    assert all(item.report["devices"] == [0, 1] for item in others)
    assert not alive(first)
    left_nothing(machine)


def test_ctrl_c_frees_the_gpus(machine: Machine, tmp_path: Path) -> None:
    search = slow_search(machine, tmp_path, seconds=1.0)
    trial = running_trial(search)
    search.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    search.process.send_signal(signal.SIGINT)
    search.finish(code=130)
    assert not alive(trial)
    left_nothing(machine)


def test_a_tuner_that_is_killed_leaves_nothing_on_the_gpus(machine: Machine, tmp_path: Path) -> None:
    search = slow_search(machine, tmp_path, seconds=1.0)
    trial = running_trial(search)
    search.process.kill()
    search.finish(code=-signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while any(use.processes for use in machine.use()) and time.monotonic() < deadline:
        time.sleep(0.2)
    left_nothing(machine)
    assert not alive(trial)
