"""Devices of an ended launch: returned once they are free, withheld and reported if they are overdue."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from optuna_dsat.launch.facts import StopReason
from optuna_dsat.launch.launcher import local_launcher
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.machine.processes import new_mark
from optuna_dsat.launch.places.here import Here
from optuna_dsat.launch.protocol import Finished, LaunchReport
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.processes import MARK_ENV
from tests.harness.launches import followed, processes_of
from tests.harness.nvml_machine import Machine, machine, nvml_libraries, uuid

__all__ = ["machine", "nvml_libraries"]

GPU = f"gpu {uuid(0)} 81920 {{used}} NVIDIA H100 80GB HBM3"


class Bench:
    """A launch that sleeps on one GPU, and the slots of the launcher that it belongs to."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.agent = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: (mark := new_mark())})
        self.launcher = local_launcher(folder, devices=machine.detect("0"), nvml=machine.nvml())
        places, pool = cast(Here, self.launcher._places), machine.pool("0")
        places._pool = pool
        self.launch = followed(folder, self.agent, mark, pool=pool)
        self.launcher._running["trial-0000"] = self.launch
        places._launches["trial-0000"] = processes_of(self.launch)

    def end(self) -> float:
        """End the launch at second 1 and follow it to its end; return when its last process was seen to be gone."""
        self.launch.end(StopReason(outcome=Outcome.PRUNED, message="enough"))
        self.agent.wait()
        now = 1.0
        while self.launch.gone_at is None:
            self.launch.advance(now)
            now += 1.0
        return self.launch.gone_at

    def finished(self) -> list[LaunchReport]:
        return [update.report for update in self.launcher.poll(0.0) if isinstance(update, Finished)]


@pytest.fixture
def bench(machine: Machine, tmp_path: Path) -> Iterator[Bench]:
    machine.has(GPU.format(used=0))
    bench = Bench(machine, tmp_path)
    yield bench
    bench.launcher.close()


def test_the_wait_for_a_gpus_memory_counts_from_the_end_of_the_last_process(bench: Bench) -> None:
    gone_at = bench.end()
    bench.launch.advance(gone_at + 30.0)
    assert bench.launch.gone_at == gone_at


def test_memory_that_does_not_come_back_is_named_and_its_gpu_withheld(bench: Bench, machine: Machine) -> None:
    bench.end()
    machine.has(GPU.format(used=4096))
    assert bench.finished() == []
    processes_of(bench.launch)._gone_at -= 61.0
    (report,) = bench.finished()
    assert "not free after 60 s: GPU 0: 4.0 GiB in use" in report.message
    with pytest.raises(DeviceError, match=r"devices of trial-0000 are not free .*GPU 0: 4\.0 GiB in use"):
        bench.launcher.poll(0.1)
    assert bench.launcher.free_slots == 0
    machine.has(GPU.format(used=0))
    bench.launcher.poll(0.1)
    assert bench.launcher.free_slots == 1
