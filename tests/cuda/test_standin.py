"""The stand-in keeps the rules of CUDA that programs fall foul of."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cuda.machine import Machine

DEVICES = """
import ctypes
driver, count, uuid = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
if driver.cuInit(0) == 0:
    driver.cuDeviceGetCount(ctypes.byref(count))
for ordinal in range(count.value):
    driver.cuDeviceGetUuid_v2(uuid, ordinal)
    print(bytes(uuid)[:4].hex())
"""


def seen(machine: Machine, visible: str | None) -> list[int]:
    """Return the numbers of the GPUs that CUDA has, in its order: the first part of their UUIDs."""
    return [int(digits, 16) for digits in machine.run(DEVICES, visible=visible).split()]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("5,2", [5, 2]),
        ("3,9,1", [3]),
        ("1,1", []),
        ("", []),
        ("GPU-00000006-5747-4d3e-8f1c-9a2b3c4d5e6f,GPU-00000001", [6, 1]),
        ("GPU-00000006,1", [6]),
        ("GPU-0000000", []),
    ],
)
def test_cuda_visible_devices_chooses_up_to_the_first_entry_that_is_invalid(
    machine: Machine, visible: str | None, expected: list[int]
) -> None:
    assert seen(machine, visible) == expected


def test_torch_sees_what_the_driver_says(machine: Machine) -> None:
    program = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(1))"
    count, properties = machine.run(program, visible="5,2").split(maxsplit=1)
    assert count == "2"
    assert f"uuid={machine.gpus[2].uuid.removeprefix('GPU-')}" in properties
    assert "total_memory=81559MB" in properties


def test_without_an_order_the_fastest_gpu_comes_first(machine: Machine) -> None:
    machine.change_gpu(6, speed=3)
    machine.change_gpu(2, speed=2)
    assert seen(machine, None) == [6, 2, 0, 1, 3, 4, 5, 7]
    assert seen(machine, "0,1") == [6, 2]


FORK = """
import ctypes, os
driver = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 3
before = os.fork()
if not before:
    os._exit(driver.cuInit(0))
assert driver.cuInit(0) == 0 == driver.cuCtxGetCurrent(ctypes.byref(context))
after = os.fork()
if not after:
    os._exit(driver.cuInit(0) * 10 + driver.cuCtxGetCurrent(ctypes.byref(context)))
print(os.waitstatus_to_exitcode(os.waitpid(before, 0)[1]), os.waitstatus_to_exitcode(os.waitpid(after, 0)[1]))
"""


def test_a_process_forked_after_cuinit_cannot_use_the_driver(machine: Machine) -> None:
    assert machine.run(FORK).split() == ["0", "33"]


def test_memory_ends_where_the_gpu_does(machine: Machine) -> None:
    machine.change_gpus(memory_mib=1024)
    message = machine.run("""
import torch
kept = torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
""")
    assert message.startswith("CUDA out of memory. Tried to allocate 100.00 MiB.")
    assert "total capacity of 1024.00 MiB of which 68.00 MiB is free" in message


def test_what_others_hold_is_missing(machine: Machine) -> None:
    program = "import torch; print(torch.cuda.mem_get_info()[0] >> 20)"
    alone = int(machine.run(program))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        machine.say(f"holder 0 {other.pid} 5000")
        assert machine.use()[0].processes == {other.pid: 5000 << 20}
        assert int(machine.run(program)) == alone - 5000
        other.communicate(b"\n")
    assert machine.use()[0].used_bytes == 0
    assert int(machine.run(program)) == alone


def test_nvml_lists_a_process_while_it_lives(machine: Machine) -> None:
    program = (
        'import os, torch; held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda"); print(os.getpid()); input()'
    )
    with subprocess.Popen(
        [str(machine.python), "-u", "-c", program],
        env=machine.environment(visible="3"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        use = machine.use()
        process.kill()
        process.wait()
    assert use[3].processes == {process.pid: (256 + 64) << 20}
    assert sum(item.used_bytes for item in use) == use[3].used_bytes == (256 + 64) << 20
    assert machine.use()[3].processes == {}


def test_pinned_memory_has_a_limit(machine: Machine) -> None:
    machine.say("pinned 16")
    program = """
import torch
assert torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True).is_pinned()
try:
    torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True)
except RuntimeError as error:
    print(type(error).__name__, str(error).splitlines()[0])
"""
    assert machine.run(program).split() == ["AcceleratorError", "CUDA", "error:", "out", "of", "memory"]


def test_a_library_fails_where_the_description_says_so(machine: Machine) -> None:
    machine.say("fail cublasCreate 1 0")
    program = """
import torch
one = torch.ones(2, 2, device="cuda")
try:
    one @ one
except RuntimeError as error:
    print(error)
"""
    assert "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate" in machine.run(program)
