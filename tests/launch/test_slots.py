from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.devices import (
    Nvml,
    cpu_devices,
    detect_devices,
)
from optuna_dsat.launch.machine.host import host_memory_bytes
from optuna_dsat.launch.machine.slots import SlotPool
from optuna_dsat.runtime.agent.processes import ProcessKey

GIB = 2**30
GONE = 2**22 + 1
"""A process number that Linux never assigns."""


class FakeNvml:
    """Replaces the module ``pynvml``: GPUs of 80 GiB, with settable memory use and processes."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 4) -> None:
        self.used = [0] * count
        self.compute: list[dict[int, int | None]] = [{} for _ in range(count)]
        self.graphics: list[set[int]] = [set() for _ in range(count)]
        self.broken = False

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return f"GPU model {handle}".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=80 * GIB, used=self.used[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.compute[handle].items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.graphics[handle]]


@pytest.fixture
def fake() -> FakeNvml:
    return FakeNvml()


def gpu_pool(fake: FakeNvml, tmp_path: Path, *, visible: str | None = None, **options: Any) -> SlotPool:
    nvml = Nvml(fake)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    clock = iter(range(0, 10**6, 10))  # every reading is new
    return SlotPool(
        detect_devices(environ=environ, nvml=nvml),
        nvml=nvml,
        lock_dir=tmp_path,
        clock=lambda: float(next(clock)),
        **options,
    )


@pytest.mark.parametrize(
    "environ", [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, {"DS_ACCELERATOR": "cpu"}]
)
def test_hidden_gpus_mean_the_cpu(fake: FakeNvml, environ: dict[str, str]) -> None:
    result = detect_devices(environ=environ, nvml=Nvml(fake), cpu_ranks=3)
    assert (result.kind, len(result.devices)) == ("cpu", 3)


def test_no_gpu_means_two_ranks_on_the_cpu() -> None:
    result = detect_devices(environ={}, nvml=Nvml(FakeNvml(0)))
    assert (result.kind, result.indices) == ("cpu", (0, 1))
    assert result.devices[0].memory_bytes == result.host_memory_bytes // 2
    assert result.host_memory_bytes == host_memory_bytes() > 0


def test_cpu_ranks_must_be_positive() -> None:
    with pytest.raises(UsageError, match="--cpu-ranks"):
        cpu_devices(0)


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
    with pytest.raises(UsageError, match="--max-slots is at least 1; got 0"):
        SlotPool(cpu_devices(1), max_slots=0)


@pytest.mark.parametrize("slots", [0, -1])
def test_a_launch_takes_at_least_one_slot(slots: int) -> None:
    with pytest.raises(RuntimeError, match="asks for"):
        SlotPool(cpu_devices(2)).take(slots)


def test_gpus_in_use_by_others_are_left_alone(fake: FakeNvml, tmp_path: Path) -> None:
    fake.compute[0] = {os.getpid(): 5 * GIB}  # listed
    fake.used[1] = 30 * GIB  # not listed, as in a container
    pool = gpu_pool(fake, tmp_path)
    assert (pool.total, pool.free) == (4, 2)
    assert pool.take(2).indices == (2, 3)
    fake.compute[0] = {}
    assert pool.free == 1


def test_a_desktop_does_not_make_a_gpu_busy(fake: FakeNvml, tmp_path: Path) -> None:
    fake.compute[0] = {500: GIB}
    fake.graphics[0] = {500}
    fake.used[0] = 2 * GIB
    assert gpu_pool(fake, tmp_path).take(1).indices == (0,)


def test_two_tuners_never_take_the_same_gpu(fake: FakeNvml, tmp_path: Path) -> None:
    first, other = gpu_pool(fake, tmp_path), gpu_pool(fake, tmp_path)
    lease = first.take(3)
    with pytest.raises(RuntimeError, match="taken by another optuna-dsat"):
        other.take(2)
    assert other.take(1).indices == (3,)
    first.give_back(lease)
    assert other.take(3).indices == (0, 1, 2)


def test_a_gpu_is_free_when_its_memory_is_back(fake: FakeNvml, tmp_path: Path) -> None:
    fake.used = [GIB] * 4
    pool = gpu_pool(fake, tmp_path)
    lease = pool.take(2)
    fake.used[0] = 60 * GIB
    assert not pool.is_free(lease)
    fake.used[0] = GIB + 32 * 2**20
    assert pool.is_free(lease)


def test_a_gpu_is_not_free_while_a_process_of_ours_is_listed(fake: FakeNvml, tmp_path: Path) -> None:
    pool = gpu_pool(fake, tmp_path)
    lease = pool.take(1)
    fake.compute[0] = {4711: 0}
    assert not pool.is_free(lease, {ProcessKey(4711, 1)})
    assert pool.is_free(lease, {ProcessKey(4712, 1)})


def test_memory_that_a_living_process_of_somebody_else_took_meanwhile_is_not_ours(
    fake: FakeNvml, tmp_path: Path
) -> None:
    pool = gpu_pool(fake, tmp_path)
    lease = pool.take(1)
    fake.used[0] = 10 * GIB
    fake.compute[0] = {os.getpid(): 10 * GIB}
    assert pool.is_free(lease)
    fake.compute[0] = {GONE: 10 * GIB}
    assert not pool.is_free(lease)
    assert "10.0 GiB in use" in pool.describe_use(lease)
