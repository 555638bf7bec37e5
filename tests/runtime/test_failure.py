from __future__ import annotations

import errno
import runpy
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.failure import (
    TooFewSamplesError,
    diagnose,
    failure_line,
    format_traceback,
    message_of,
    message_with_cause,
    missing_bytes,
    without_runtime_frames,
)
from optuna_dsat.secrecy.references import hidden_text

OOM, HOST = Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY
BROKEN, LOST = Outcome.SCRIPT_ERROR, Outcome.COMMUNICATION_ERROR
REFUSED = Outcome.INVALID_CONFIG

CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
)
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.29.7\nncclUnhandledCudaError: Call to CUDA function failed."
)
NO_HANDLE = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
CUDA_OOM = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/ for more"
PIN_THREAD = (
    "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"
    '  File "torch/utils/data/_utils/pin_memory.py", line 98, in pin_memory\n'
)


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
        (ValueError("step 3 failed: CUDA out of memory. Tried to allocate 2.00 GiB"), OOM, OOM),
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


@pytest.mark.parametrize(
    ("message", "outcome", "missing"),
    [
        (f"{NCCL}\nLast error:\nFailed to CUDA calloc 6291456 bytes", OOM, 6291456),
        (f"{NCCL}\nLast error:\nFailed to CUDA calloc async 1920 bytes", OOM, 1920),
        (f"{NCCL}\nLast error:\nCuda failure 'out of memory'", OOM, None),
        (f"{NCCL}\nLast error:\nCuda failure 2 'out of memory'", OOM, None),
        (f"{NCCL}\nLast error:\nFailed to CUDA host alloc 4923392 bytes", HOST, 4923392),
        (f"{NCCL}\nLast error:\nFailed to malloc 4096 bytes", HOST, 4096),
        ("CUDA driver error: out of memory", OOM, None),
        ("cuda runtime error (2) : out of memory at THCTensorRandom.cu:25", OOM, None),
        ("CUDA error (/flash_fwd_launch_template.h:188): out of memory", OOM, None),
        ("Triton Error [CUDA]: out of memory", OOM, None),
        ("HIP error: out of memory", OOM, None),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", OOM, None),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", OOM, None),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", OOM, None),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", HOST, None),
        ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`", OOM, None),
        ("cuFFT error: CUFFT_ALLOC_FAILED", OOM, None),
        ("CUDA out of memory. Allocation was preemptively rejected. Requested size: 2.00 GiB", OOM, 2**31),
        (f"{PIN_THREAD}{CUDA_OOM}", HOST, None),
        ("cudaHostRegister failed: CUDA error: OS call failed or operation not supported on this OS", HOST, None),
    ],
)
def test_a_lack_of_memory_is_seen_in_every_disguise(message: str, outcome: Outcome, missing: int | None) -> None:
    for kind in (RuntimeError, torch.AcceleratorError, torch.distributed.DistBackendError):
        result = diagnose(kind(message), phase="backward", device="cuda", limited=False)
        assert (result.outcome, result.missing_bytes) == (outcome, missing)
        wrapped = ValueError("the step failed")
        wrapped.__cause__ = kind(message)
        assert diagnose(wrapped, phase="initialize", device="cuda", limited=False).outcome == outcome


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        (f"{NCCL}\nLast error:\nCuda failure 1 'invalid argument'", LOST),
        ("CUDA error: too many resources requested for launch", BROKEN),
        ("CUDA error: no kernel image is available for execution on the device", BROKEN),
        ("Triton Error [CUDA]: invalid argument", BROKEN),
        ("out of resource: shared memory, Required: 270336, Hardware limit: 232448.", BROKEN),
        (f"{PIN_THREAD}CUDA error: device-side assert triggered", BROKEN),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`", BROKEN),
    ],
)
def test_other_errors_of_a_gpu_are_no_lack_of_memory(message: str, outcome: Outcome) -> None:
    assert diagnose(RuntimeError(message), phase="forward", device="cuda", limited=False).outcome == outcome


def _answers(free_mib: int, total_mib: int) -> Callable[[], tuple[int, int]]:
    return lambda: (free_mib * 2**20, total_mib * 2**20)


def _fails(error: Exception) -> Callable[[], tuple[int, int]]:
    def fail() -> tuple[int, int]:
        raise error

    return fail


@pytest.mark.parametrize(
    ("device_memory", "no_handle", "unexplained"),
    [
        (_answers(90, 81920), OOM, OOM),
        (_answers(40000, 81920), BROKEN, LOST),
        (_answers(300, 2048), BROKEN, LOST),
        (_fails(AssertionError("Torch not compiled with CUDA enabled")), OOM, LOST),
        (_fails(torch.AcceleratorError("CUDA error: device-side assert triggered")), BROKEN, LOST),
        (_fails(torch.AcceleratorError("CUDA error: out of memory")), OOM, OOM),
    ],
    ids=["full", "half empty", "a small device with room", "unknown", "broken before", "no room for a context"],
)
def test_what_an_error_does_not_say_is_judged_by_the_memory_that_is_left(
    monkeypatch: pytest.MonkeyPatch, device_memory: Callable[[], Any], no_handle: Outcome, unexplained: Outcome
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", device_memory)
    for message in (NO_HANDLE, "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"):
        assert diagnose(RuntimeError(message), phase="forward", device="cuda", limited=False).outcome == no_handle
    silent = torch.distributed.DistBackendError(NCCL)
    assert diagnose(silent, phase="initialize", device="cuda", limited=False).outcome == unexplained


def test_the_scripts_own_connections_are_its_own_affair() -> None:
    assert diagnose(ConnectionResetError(), phase="between", device="cpu", limited=False).outcome == BROKEN


def test_the_cause_behind_an_exception_counts_also_if_from_none_hides_it() -> None:
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    result = diagnose(wrapped, phase="forward", device="cuda", limited=False)
    assert (result.outcome, result.missing_bytes) == (OOM, 20 * 2**20)
    handled = RuntimeError("while cleaning up")
    handled.__context__ = MemoryError()
    assert diagnose(handled, phase="step", device="cpu", limited=False).outcome == OOM
    handled.__suppress_context__ = True
    assert diagnose(handled, phase="step", device="cpu", limited=False).outcome == OOM


PINNING = """
def fail(*_, **__): raise error
def wrapped(*args, **kwargs): return fail(*args, **kwargs)
def pin_memory(tensor): return fail(tensor)
def _torch_empty_pinned(tensor): return wrapped(tensor)
def on_the_same_line(): return wrapped(3, pin_memory=True)
def on_a_later_line():
    return wrapped(
        3,
        pin_memory=True,
    )
def on_the_device(): return wrapped(3, pin_memory=False)
"""


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        ("pin_memory(None)", HOST),
        ("_torch_empty_pinned(None)", HOST),
        ("on_the_same_line()", HOST),
        ("on_a_later_line()", HOST),
        ("on_the_device()", OOM),
        ("fail()", OOM),
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_cudas_message_means_the_host_where_memory_was_pinned(
    tmp_path: Path, kind: type[Exception], call: str, outcome: Outcome
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{PINNING}\n{call}\n", encoding="utf-8")
    with pytest.raises(kind) as caught:
        exec(compile(script.read_text(), str(script), "exec"), {"error": kind(CUDA_OOM)})
    assert diagnose(caught.value, phase="initialize", device="cuda", limited=False).outcome == outcome


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


def test_the_traceback_has_the_frames_of_script_and_libraries_only() -> None:
    def wrapped() -> None:
        exec(compile("1 / 0", "engine.py", "exec"))

    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("wrapped()", "/home/user/train.py", "exec"), {"wrapped": wrapped})
    trace = without_runtime_frames(caught.value.__traceback__, str(__file__))
    assert [frame.filename for frame in traceback.extract_tb(trace)] == ["/home/user/train.py", "engine.py"]


def test_data_that_fill_no_batch_are_out_of_data() -> None:
    short = TooFewSamplesError("The training data has 3 samples: too few for a batch of 8")
    in_generator = RuntimeError("generator raised StopIteration")
    in_generator.__cause__ = StopIteration()
    schedule = OneCycleLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), max_lr=1.0, total_steps=2)
    schedule.optimizer.step()
    schedule.step()
    schedule.step()
    with pytest.raises(ValueError, match="Tried to step") as ended:
        schedule.step()
    for error in (short, StopIteration(), in_generator, ended.value):
        assert diagnose(error, phase="between", device="cpu", limited=False).outcome is Outcome.OUT_OF_DATA
    assert diagnose(ValueError("another"), phase="between", device="cpu", limited=False).outcome is BROKEN


def test_of_a_huge_message_beginning_and_end_are_looked_at() -> None:
    """20 MB took longer than the stall limit, and secrets were not searched beyond a million characters."""
    token = "hf_" + "aB3" * 11
    error = RuntimeError(f"{token} " + "A" * 20_000_000 + " CUDA out of memory")
    began = time.process_time()
    assert diagnose(error, phase="forward", device="cuda", limited=False).outcome is Outcome.OUT_OF_MEMORY
    texts = [hidden_text(message_of(error)), hidden_text(format_traceback(error, None))]
    assert time.process_time() - began < 2
    assert not [text for text in texts if token in text]
    assert texts[0].startswith("*** AAA")


NINJA = """Error building extension 'cpu_adam': [1/3] c++ -MMD -MF cpu_adam.o.d -I/include
FAILED: [code=127] cpu_adam.o
c++ -MMD -MF cpu_adam.o.d -I/include
%s
ninja: build stopped: subcommand failed."""


def test_an_error_without_a_message_is_described_by_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("before, config = {'zero': 1}, {'zero': 2}\nif True:\n    assert before == config\n")
    with pytest.raises(AssertionError) as compared:
        runpy.run_path(str(script))
    assert message_with_cause(compared.value) == "assert before == config (train.py, line 3)"
    assert message_with_cause(AssertionError()) == ""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/bin/sh: 1: c++: not found", "c++: not found"),
        ("/bin/sh: line 1: g++: command not found", "g++: command not found"),
        ("adam.cpp:3:10: fatal error: torch.h: No such file", "fatal error: torch.h: No such file"),
        ("collect2", "see the log"),
    ],
)
def test_a_failed_build_is_told_by_its_cause_and_not_by_the_compilers_command(line: str, reason: str) -> None:
    built = RuntimeError(NINJA % line)
    assert message_with_cause(built) == f"Error building extension 'cpu_adam': {reason}"
    error = RuntimeError("DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load.")
    error.__cause__ = built
    words = f"DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load: {message_with_cause(built)}"
    assert message_with_cause(error) == words
    error.__cause__ = RuntimeError("Ninja is required to load C++ extensions")
    assert message_with_cause(error).endswith("build/load: Ninja is required to load C++ extensions")
    assert message_with_cause(ValueError("plain")) == "plain"
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert message_with_cause(error).endswith("unexpectedly: DataLoader worker (pid 7) is killed by signal: Killed.")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "1 validation error for DeepSpeedZeroConfig\nreduce_bucket_size\n  Input should be a valid integer ["
            "type=int_parsing, input_value='2e8', input_type=str]\n    For further "
            "information visit https://errors.pydantic.dev/2.14/v/int_parsing",
            "zero_optimization.reduce_bucket_size is '2e8': it must be a whole number",
        ),
        (
            "2 validation errors for DeepSpeedZeroConfig\ncpu_offload_params\n  Extra inputs are not permitted "
            "[type=extra_forbidden, input_value=True, input_type=bool]\n    For further information visit x\n"
            "offload_optimizer.device\n  Input should be 'none', 'cpu' or 'nvme' [type=enum, input_value='gpu', "
            "input_type=str]",
            "zero_optimization.cpu_offload_params: DeepSpeed has no such key; "
            "zero_optimization.offload_optimizer.device is 'gpu': it must be 'none', 'cpu' or 'nvme'",
        ),
        (
            "1 validation error for DeepSpeedZeroConfig\nstage\n  Input should be 0, 1, 2, 3 or 3 [type=enum, "
            "input_value=7, input_type=int]",
            "zero_optimization.stage is 7: it must be 0, 1, 2 or 3",
        ),
        (
            "1 validation error for DeepSpeedZeroConfig\nstage \n  Extra inputs are not permitted "
            "[type=extra_forbidden, input_value=1, input_type=int]",
            "'zero_optimization.stage ': DeepSpeed has no such key: remove the blank at its end",
        ),
        (
            "1 validation error for Settings\n  Value error, a and b exclude each other [type=value_error, "
            "input_value={'a': 1}, input_type=dict]",
            "Settings: a and b exclude each other",
        ),
        (
            "Please correct:\n- lr=1 vs 2\n- steps=3 vs 4\nSet them to 'auto'.",
            "Please correct: lr=1 vs 2; steps=3 vs 4; Set them to 'auto'",
        ),
        (
            "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            '  File "a.py", line 1, in b\n    c()\nOSError: d\n\nDuring handling of the above exception, another '
            'exception occurred:\n\nTraceback (most recent call last):\n  File "a.py", line 3, in b\n'
            "KeyError: 'bad sample 633'\n",
            "Caught KeyError in DataLoader worker process 0: KeyError: 'bad sample 633'",
        ),
        ("\n  first line.\nsecond", "first line"),
        ("", ""),
    ],
)
def test_the_line_names_keys_and_cause(message: str, line: str) -> None:
    assert failure_line(message) == line
