from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.launcher import local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices, detect_devices
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.machine.processes import new_mark
from optuna_dsat.launch.machine.slots import SlotPool
from optuna_dsat.launch.places.here import Here
from optuna_dsat.launch.protocol import Finished, LaunchReport, Verdict
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.processes import MARK_ENV, ProcessKey
from optuna_dsat.runtime.measure.memory import host_memory_bytes
from tests.harness.launches import followed, processes_of
from tests.harness.nvml_machine import Machine, uuid

GONE = 2**22 + 1
"""A process number that Linux never assigns."""


def use(machine: Machine, *used_mib: int) -> None:
    """Have GPUs of 80 GiB with this much memory in use, and no process that is listed."""
    machine.has(*(f"gpu {uuid(index)} 81920 {used} NVIDIA H100" for index, used in enumerate(used_mib)))


@pytest.fixture
def gpus(machine: Machine) -> Machine:
    use(machine, 0, 0, 0, 0)
    return machine


@pytest.mark.parametrize(
    "environ", [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, {"DS_ACCELERATOR": "cpu"}]
)
def test_hidden_gpus_mean_the_cpu(gpus: Machine, environ: dict[str, str]) -> None:
    result = detect_devices(environ=environ, nvml=gpus.nvml())
    assert (result.kind, len(result.devices)) == ("cpu", 2)


def test_no_gpu_means_two_ranks_on_the_cpu(machine: Machine) -> None:
    machine.has()
    result = machine.detect()
    assert (result.kind, result.indices) == ("cpu", (0, 1))
    assert "shows no GPU" in result.notices[0]
    assert result.devices[0].memory_bytes == result.host_memory_bytes // 2
    assert result.host_memory_bytes == host_memory_bytes() > 0


def test_numbers_of_ranks_and_slots_are_positive() -> None:
    with pytest.raises(UsageError, match="--cpu-ranks"):
        cpu_devices(0)
    for slots in (0, -1):
        with pytest.raises(RuntimeError, match="asks for"):
            SlotPool(cpu_devices(2)).take(slots)
    with pytest.raises(UsageError, match="--max-slots is at least 1; got 0"):
        SlotPool(cpu_devices(1), max_slots=0)


def test_cpu_slots_are_taken_and_given_back() -> None:
    pool = SlotPool(cpu_devices(3))
    assert (pool.kind, pool.total, pool.free) == ("cpu", 3, 3)
    first = pool.take(2)
    assert first.indices == (0, 1)
    assert pool.free == 1
    with pytest.raises(RuntimeError, match="asks for 2 slots; 1 of 3 are free"):
        pool.take(2)
    assert pool.is_free(first)
    pool.give_back(first)
    pool.give_back(first)
    assert pool.free == 3


def test_max_slots_bounds_what_is_in_use() -> None:
    pool = SlotPool(cpu_devices(4), max_slots=3)
    assert (pool.total, pool.free) == (3, 3)
    pool.take(2)
    assert pool.free == 1


def test_gpus_in_use_by_others_are_left_alone(gpus: Machine) -> None:
    use(gpus, 0, 30 * 1024, 0, 0)  # the second not listed, as in a container
    gpus.gets(listed := f"process 0 compute {os.getpid()} 5120")
    pool = gpus.pool()
    assert (pool.total, pool.free) == (4, 2)
    assert pool.take(2).indices == (2, 3)
    gpus.loses(listed)
    assert pool.free == 1


def test_a_desktop_does_not_make_a_gpu_busy(gpus: Machine) -> None:
    use(gpus, 2048, 0, 0, 0)
    gpus.gets("process 0 compute 500 1024", "process 0 graphics 500 -")
    assert gpus.pool().take(1).indices == (0,)


def test_two_tuners_never_take_the_same_gpu(gpus: Machine) -> None:
    first, other = gpus.pool(), gpus.pool()
    lease = first.take(3)
    with pytest.raises(RuntimeError, match="taken by another optuna-dsat"):
        other.take(2)
    assert other.take(1).indices == (3,)
    first.give_back(lease)
    assert other.take(3).indices == (0, 1, 2)


def test_a_gpu_is_free_when_its_memory_is_back(gpus: Machine) -> None:
    use(gpus, *[1024] * 4)
    pool = gpus.pool()
    lease = pool.take(2)
    use(gpus, 60 * 1024, 1024, 1024, 1024)
    assert not pool.is_free(lease)
    use(gpus, 1024 + 32, 1024, 1024, 1024)
    assert pool.is_free(lease)


def test_a_gpu_is_not_free_while_a_process_of_ours_is_listed(gpus: Machine) -> None:
    pool = gpus.pool()
    lease = pool.take(1)
    gpus.gets("process 0 compute 4711 0")
    assert not pool.is_free(lease, {ProcessKey(4711, 1)})
    assert pool.is_free(lease, {ProcessKey(4712, 1)})


def test_memory_that_a_living_process_of_somebody_else_took_meanwhile_is_not_ours(gpus: Machine) -> None:
    pool = gpus.pool()
    lease = pool.take(1)
    use(gpus, 10 * 1024, 0, 0, 0)
    gpus.gets(listed := f"process 0 compute {os.getpid()} 10240")
    assert pool.is_free(lease)
    gpus.loses(listed)
    gpus.gets(f"process 0 compute {GONE} 10240")
    assert not pool.is_free(lease)
    assert "10.0 GiB in use" in pool.describe_use(lease)


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
        self.launch.end(Verdict(outcome=Outcome.PRUNED, message="enough"))
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
