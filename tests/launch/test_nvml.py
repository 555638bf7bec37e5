"""Answers of NVML on real machines other than numbers; none of them ends a search."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from optuna_dsat.launch.machine import devices as devices_module
from optuna_dsat.launch.machine.nvml import DeviceError, NvmlError
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.measure.memory import host_memory_bytes
from tests.harness.nvml_machine import GPU_IS_LOST, MIB, NOT_SUPPORTED, UNKNOWN, Machine, uuid

COMPUTE, GRAPHICS = "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"
MEMORY = "nvmlDeviceGetMemoryInfo"
PARTS = [f"MIG-{letter}0000000-1111-2222-3333-444444444444" for letter in "ab"]


def test_without_a_list_of_processes_memory_tells_who_uses_a_gpu(machine: Machine) -> None:
    machine.has(
        f"gpu {uuid(0)} 81559 4 NVIDIA H100 80GB HBM3",
        f"gpu {uuid(1)} 81559 30000 NVIDIA H100 80GB HBM3",
        f"refuse {COMPUTE} {NOT_SUPPORTED}",
        f"refuse {GRAPHICS} {UNKNOWN}",
    )
    pool = machine.pool()
    assert machine.detect().notices == ()
    assert (pool.total, pool.free) == (2, 1)
    lease = pool.take(1)
    assert lease.indices == (0,)
    assert pool.is_free(lease, {ProcessKey(4711, 1)})
    assert "not listed" in pool.describe_use(lease)
    assert [holder.device for holder in pool.holders()] == ["GPU 0", "GPU 1"]


def test_a_graphics_list_that_cannot_be_had_leaves_the_compute_list(machine: Machine) -> None:
    machine.gets(f"process 0 compute {os.getpid()} 900", f"refuse {GRAPHICS} {NOT_SUPPORTED}")
    assert machine.pool().take(1).indices == (1,)


def test_a_driver_without_the_lists_that_pynvml_wants_is_judged_by_memory(machine: Machine) -> None:
    machine.has(f"gpu {uuid(0)} 81559 4 NVIDIA H100", f"gpu {uuid(1)} 81559 30000 NVIDIA H100")
    nvml = machine.nvml(driver="old")
    pynvml = machine.pynvml("old")
    with pytest.raises(pynvml.NVMLLibraryMismatchError) as raw:
        pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    assert not isinstance(raw.value, pynvml.NVMLError)
    assert nvml.use("0").processes is None
    assert machine.pool(driver="old").take(1).indices == (0,)


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", MEMORY])
def test_one_lost_gpu_of_eight_is_left_out_and_the_others_are_named_for_certain(
    machine: Machine, function: str
) -> None:
    machine.gpus(8)
    machine.gets(f"refuse {function} {GPU_IS_LOST} 3")
    result = machine.detect()
    assert result.indices == (0, 1, 2, 4, 5, 6, 7)
    assert [device.visible_id for device in result.devices] == [uuid(index) for index in result.indices]
    (notice,) = result.notices
    assert notice.startswith(f"GPU 3 is left out, it does not answer ({function}: ")
    assert machine.pool().take(7).indices == result.indices


def test_where_no_gpu_answers_the_error_names_each_of_them(machine: Machine) -> None:
    machine.gets(f"refuse {MEMORY} {GPU_IS_LOST}")
    with pytest.raises(DeviceError, match=r"No GPU answers\. GPU 0 is left out.* GPU 1 is left out") as caught:
        machine.detect()
    assert "CUDA_VISIBLE_DEVICES=" in str(caught.value)


def test_a_gpu_that_shares_the_hosts_memory_is_judged_by_its_processes(machine: Machine) -> None:
    machine.has(f"gpu {uuid(0)} - - NVIDIA GB10", f"refuse {MEMORY} {NOT_SUPPORTED}")
    pool = machine.pool()
    (device,) = machine.detect().devices
    assert (device.name, device.memory_bytes) == ("NVIDIA GB10", host_memory_bytes())
    lease = pool.take(1)
    machine.gets("process 0 compute 4711 900")
    assert not pool.is_free(lease, {ProcessKey(4711, 1)})
    machine.loses("process 0 compute 4711 900")
    assert pool.is_free(lease, {ProcessKey(4711, 1)})
    assert "memory in use not known" in pool.describe_use(lease)
    pool.give_back(lease)
    machine.gets(f"process 0 compute {os.getpid()} -")
    assert pool.free == 0


def test_a_gpu_that_falls_off_the_bus_mid_search_is_left_out_and_comes_back(machine: Machine) -> None:
    notices: list[str] = []
    pool = machine.pool(on_notice=notices.append)
    lease = pool.take(2)
    lost = f"refuse {MEMORY} {GPU_IS_LOST} 0"
    machine.gets(lost)
    assert pool.is_free(lease)
    assert "GPU 0 does not answer" in pool.describe_use(lease)
    pool.give_back(lease)
    assert pool.free == 1
    (notice,) = notices
    assert notice.startswith(f"GPU 0 does not answer any more ({MEMORY}: ")
    again = pool.take(1)
    assert [device.visible_id for device in again.devices] == [uuid(1)]
    assert pool.holders()[0].who.startswith("it does not answer (")
    pool.give_back(again)
    machine.loses(lost)
    assert pool.free == 2
    assert notices[1:] == ["GPU 0 answers again."]
    assert [device.visible_id for device in pool.take(2).devices] == [uuid(0), uuid(1)]


@pytest.mark.parametrize(
    ("visible", "indices", "said"),
    [
        (None, (0, 1, 2, 3), ""),
        ("2,3", (2, 3), ""),
        ("3, 1", (3, 1), ""),
        ("1,-1,2", (1,), "'-1' is no device, so CUDA ignores '-1,2'"),
        ("0,9,1", (0,), "'9' is not one of this machine's 4 GPUs, so CUDA ignores '9,1'"),
        ("0,0,1", (0, 1), "GPU 0 counts once"),
        (f"{uuid(2)},{uuid(1)}", (2, 1), ""),
        (f"{uuid(2)[:12]},{uuid(2)}", (2,), "GPU 2 counts once"),
        (f"{uuid(3)[:12]},GPU-0", (3,), "'GPU-0' may be GPU 0 or 1 or 2 or 3"),
        (f"1,{uuid(2)},3", (1,), "is of another kind than '1'"),
    ],
)
def test_visible_gpus_are_read_as_cuda_reads_them_and_what_is_ignored_is_said(
    machine: Machine, visible: str | None, indices: tuple[int, ...], said: str
) -> None:
    machine.gpus(4)
    result = machine.detect(visible)
    assert (result.kind, result.indices) == ("cuda", indices)
    assert bool(result.notices) is bool(said)
    assert said in " ".join(result.notices)
    by_uuid = (visible or "").startswith("GPU-")
    assert [d.visible_id for d in result.devices] == [uuid(i) if by_uuid else str(i) for i in indices]
    assert [d.uuid for d in result.devices] == [uuid(i) for i in indices]


def test_a_lost_gpu_that_is_named_by_its_uuid_hides_no_other(machine: Machine) -> None:
    machine.gpus(3)
    machine.gets(
        f"refuse nvmlDeviceGetHandleByIndex {GPU_IS_LOST} 1", f"refuse nvmlDeviceGetHandleByUUID {GPU_IS_LOST}"
    )
    result = machine.detect(f"{uuid(1)},{uuid(2)}")
    assert result.indices == (2,)
    assert result.notices[0].startswith(f"GPU {uuid(1)} is left out")


def test_a_list_that_names_no_gpu_means_the_cpu_and_says_so(machine: Machine) -> None:
    result = machine.detect("7")
    assert result.kind == "cpu"
    assert "CUDA_VISIBLE_DEVICES names no GPU: launches run on the CPU." in result.notices


def test_without_uuids_gpus_are_named_by_their_numbers(machine: Machine) -> None:
    machine.gpus(3)
    machine.gets(f"refuse nvmlDeviceGetUUID {NOT_SUPPORTED}", f"refuse nvmlDeviceGetName {GPU_IS_LOST} 0")
    assert [device.visible_id for device in machine.detect().devices] == ["1", "2"]
    assert [(device.index, device.visible_id) for device in machine.detect(uuid(2)).devices] == [(2, uuid(2))]


def test_parts_of_gpus_are_taken_one_a_launch(machine: Machine) -> None:
    machine.gets(*(f"gpu {part} 9856 12 NVIDIA H100 80GB HBM3 MIG 1g.10gb" for part in PARTS))
    machine.gets(f"refuse nvmlDeviceGetIndex {NOT_SUPPORTED} 2")
    result = machine.detect(",".join(PARTS))
    assert [(d.index, d.visible_id, d.uuid) for d in result.devices] == [
        (0, PARTS[0], PARTS[0]),
        (1, PARTS[1], PARTS[1]),
    ]
    assert result.devices[0].memory_bytes == 9856 * MIB
    assert result.per_launch == 1
    assert "a launch takes one of them" in result.notices[0]
    assert machine.detect().per_launch == 2
    pool = machine.pool(",".join(PARTS))
    machine.gets(f"process 2 compute {os.getpid()} 900")
    assert pool.take(1).devices[0].visible_id == PARTS[1]


def test_a_silent_driver_is_an_error_and_one_that_is_not_loaded_means_the_cpu(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gets("refuse nvmlInit 18")
    with pytest.raises(NvmlError, match="nvmlInit: RM has detected an NVML/RM version mismatch") as caught:
        machine.nvml()
    with pytest.raises(DeviceError, match="loaded but does not answer"):
        devices_module._without_nvml(caught.value)
    machine.loses("refuse nvmlInit 18")
    machine.gets("refuse nvmlInit 9")
    monkeypatch.setattr(devices_module, "_DRIVER", tmp_path / "none")
    with pytest.raises(NvmlError) as caught:
        machine.nvml()
    assert "Driver Not Loaded" in devices_module._without_nvml(caught.value)[0]


@pytest.mark.parametrize(
    ("driver", "control", "said"),
    [
        (True, True, DeviceError),
        (False, True, DeviceError),
        (True, False, "no GPU is given to this container"),
        (False, False, None),
    ],
)
def test_a_driver_without_nvmls_library_names_what_the_container_lacks(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: bool,
    control: bool,
    said: type[DeviceError] | str | None,
) -> None:
    monkeypatch.setattr(devices_module, "_DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setattr(devices_module, "_CONTROL", tmp_path if control else tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    machine.libraries = {"new": empty}
    with pytest.raises(NvmlError, match="NVML Shared Library Not Found") as caught:
        machine.nvml()
    if said is DeviceError:
        with pytest.raises(DeviceError, match="NVIDIA_DRIVER_CAPABILITIES=utility"):
            devices_module._without_nvml(caught.value)
        return
    notices = devices_module._without_nvml(caught.value)
    assert [str(said) in notice for notice in notices] == ([] if said is None else [True])


def test_the_loader_finds_the_machine_as_it_finds_a_real_one(machine: Machine) -> None:
    machine.gpus(2)
    machine.gets(f"refuse {COMPUTE} {NOT_SUPPORTED}")
    code = (
        "from optuna_dsat.launch.machine.devices import detect_devices\n"
        "from optuna_dsat.launch.machine.slots import SlotPool\n"
        "found = detect_devices()\n"
        "print(found.kind, found.indices, SlotPool(found).free)\n"
    )
    environ: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": uuid(1)[:12]}
    assert machine.run(code, environ=environ) == "cuda (1,) 1\n"


def test_the_largest_clocks_and_the_power_limit_are_told_where_they_are_known(machine: Machine) -> None:
    machine.has(f"gpu {uuid(0)} 81559 4 NVIDIA H100")
    assert machine.nvml().limits("0") == "SM up to 1980 MHz, memory up to 2619 MHz, power up to 700 W"
    machine.gets(f"refuse nvmlDeviceGetMaxClockInfo {NOT_SUPPORTED}")
    assert machine.nvml().limits("0") == "power up to 700 W"
    machine.gets(f"refuse nvmlDeviceGetEnforcedPowerLimit {NOT_SUPPORTED}")
    assert machine.nvml().limits("0") == ""
