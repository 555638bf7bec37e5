"""Devices of an ended launch: returned once they are free, withheld and reported if they are overdue."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from optuna_dsat.launch.agent.run import DeviceReturn
from optuna_dsat.launch.facts import StopReason
from optuna_dsat.launch.launch import RunningLaunch
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.machine.processes import MARK_ENV, new_mark
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.outcome import Outcome
from tests.harness.launches import request
from tests.harness.nvml_machine import Machine, machine, nvml_libraries, uuid

__all__ = ["machine", "nvml_libraries"]

GPU = f"gpu {uuid(0)} 81920 {{used}} NVIDIA H100 80GB HBM3"


def started(machine: Machine, folder: Path) -> tuple[DeviceReturn, RunningLaunch]:
    """Return a launch that sleeps on a GPU."""
    pool = machine.pool("0")
    lease, mark = pool.take(1), new_mark()
    agent = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: mark})
    launch = RunningLaunch(
        request=request(folder, slots=1),
        directory=RunDirectory.create(folder, "trial-0000"),
        lease=lease,
        mark=mark,
        agent=agent,
        command=(),
        started=0.0,
        started_unix=0.0,
        oom_kills_before=None,
    )
    return DeviceReturn(pool, clock=lambda: 100.0), launch


def ended(launch: RunningLaunch) -> float:
    """End a launch at second 1 and follow it to its end; return when its last process was found to be gone."""
    launch.end(StopReason(outcome=Outcome.PRUNED, message="enough"))
    launch.agent.wait()
    now = 1.0
    while launch.gone_at is None:
        launch.advance(now)
        now += 1.0
    return launch.gone_at


def test_the_wait_for_a_gpus_memory_counts_from_the_end_of_the_last_process(machine: Machine, tmp_path: Path) -> None:
    _, launch = started(machine, tmp_path)
    gone_at = ended(launch)
    launch.advance(gone_at + 30.0)
    assert launch.gone_at == gone_at


def test_memory_that_does_not_come_back_is_named_and_its_gpu_withheld(machine: Machine, tmp_path: Path) -> None:
    machine.has(GPU.format(used=0))
    returned, launch = started(machine, tmp_path)
    ended(launch)
    machine.has(GPU.format(used=4096))
    assert returned.release(launch, gone_at=99.0) is None
    note = returned.release(launch, gone_at=1.0)
    assert note is not None
    assert "not free after 60 s: GPU 0: 4.0 GiB in use" in note
    with pytest.raises(DeviceError, match=r"GPU 0: 4\.0 GiB in use"):
        returned.check()
    machine.has(GPU.format(used=0))
    returned.check()
    assert returned.release(launch, gone_at=1.0) == ""
