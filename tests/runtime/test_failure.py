from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.failure import diagnose, missing_bytes, without_runtime_frames

OOM, HOST = Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY
BROKEN, LOST = Outcome.SCRIPT_ERROR, Outcome.COMMUNICATION_ERROR
REFUSED = Outcome.INVALID_CONFIG

CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
)
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


class DeepSpeedConfigError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "on_cpu", "on_cuda"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."), OOM, OOM),
        (torch.cuda.OutOfMemoryError("HIP out of memory"), OOM, OOM),
        (MemoryError(), OOM, HOST),
        (np._core._exceptions._ArrayMemoryError((10, 10), np.dtype("f8")), OOM, HOST),  # type: ignore[attr-defined]
        (RuntimeError(CPU_ALLOCATOR), OOM, HOST),
        (RuntimeError("std::bad_alloc"), OOM, HOST),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OOM, HOST),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might ..."), OOM, OOM),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), OOM, OOM),
        (RuntimeError("cudaHostAlloc failed: out of memory"), HOST, HOST),
        (torch.distributed.DistBackendError("NCCL error: Failed to CUDA malloc 4194304 bytes"), OOM, OOM),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), LOST, LOST),
        (torch.distributed.DistNetworkError("The client socket has timed out"), LOST, LOST),
        (torch.distributed.DistStoreError("wait timeout"), LOST, LOST),
        (RuntimeError(GLOO), LOST, LOST),
        (ConnectionResetError("reset"), LOST, LOST),
        (DeepSpeedConfigError("bad"), REFUSED, REFUSED),
        (RuntimeError("out of memory is what I fear"), BROKEN, BROKEN),
        (RuntimeError("shapes cannot be multiplied"), BROKEN, BROKEN),
        (AssertionError("mine"), BROKEN, BROKEN),
        (OSError(errno.ENOENT, "No such file"), BROKEN, BROKEN),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_exception_speaks_for_an_outcome(error: Exception, on_cpu: Outcome, on_cuda: Outcome) -> None:
    assert diagnose(error, phase="forward", device="cpu", limited=False).outcome == on_cpu
    assert diagnose(error, phase="forward", device="cuda", limited=False).outcome == on_cuda


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        SystemError("error return without exception set"),
        OSError(errno.EAGAIN, "Resource temporarily unavailable"),
    ],
)
def test_some_errors_are_a_lack_of_memory_only_under_a_limit(error: Exception) -> None:
    assert diagnose(error, phase="backward", device="cpu", limited=True).outcome == OOM
    assert diagnose(error, phase="backward", device="cpu", limited=False).outcome == BROKEN


@pytest.mark.parametrize("error", [AssertionError("x"), ValueError("x"), TypeError("x"), RuntimeError("build")])
def test_what_fails_inside_initialize_was_refused_by_deepspeed(error: Exception) -> None:
    assert diagnose(error, phase="initialize", device="cpu", limited=False).outcome == REFUSED
    assert diagnose(error, phase="script", device="cpu", limited=False).outcome == BROKEN


def test_a_missing_module_or_memory_inside_initialize_is_no_refusal() -> None:
    for error, outcome in (
        (ImportError("mpi4py"), BROKEN),
        (RuntimeError(CPU_ALLOCATOR), OOM),
        (RuntimeError(GLOO), LOST),
    ):
        assert diagnose(error, phase="initialize", device="cpu", limited=True).outcome == outcome


def test_the_scripts_own_connections_are_its_own_affair() -> None:
    assert diagnose(ConnectionResetError(), phase="between", device="cpu", limited=False).outcome == BROKEN


def test_the_cause_behind_an_exception_counts_unless_it_was_set_aside() -> None:
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    found = diagnose(wrapped, phase="forward", device="cuda", limited=False)
    assert (found.outcome, found.missing_bytes) == (OOM, 20 * 2**20)
    handled = RuntimeError("while cleaning up")
    handled.__context__ = MemoryError()
    assert diagnose(handled, phase="step", device="cpu", limited=False).outcome == OOM
    handled.__suppress_context__ = True
    assert diagnose(handled, phase="step", device="cpu", limited=False).outcome == BROKEN


def test_cudas_message_means_the_host_where_memory_was_pinned() -> None:
    def pin_memory() -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError) as caught:
        pin_memory()
    assert diagnose(caught.value, phase="initialize", device="cuda", limited=False).outcome == HOST


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (CPU_ALLOCATOR, 4096),
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0", 2560 * 2**20),
        ("Unable to allocate 3. MiB for an array with shape (10,)", 3 * 2**20),
        ("nothing of the kind", None),
    ],
)
def test_missing_bytes_are_read_from_the_message(message: str, size: int | None) -> None:
    assert missing_bytes(message) == size


def test_the_traceback_starts_at_the_script() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", "/home/user/train.py", "exec"))
    trace = without_runtime_frames(caught.value.__traceback__, str(__file__))
    assert trace is not None
    assert trace.tb_frame.f_code.co_filename == "/home/user/train.py"
