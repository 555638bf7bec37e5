"""From an exception to the outcome that a rank's record speaks for.

The type decides first. Messages are read only where torch, gloo, NCCL, Triton and CUDA's libraries raise a
``RuntimeError`` of any kind: the exception's own message, never a log. The messages were collected from torch 2.13,
NCCL 2.29, cuDNN 9, Triton 3 and DeepSpeed 0.19, and from the issues of projects that use them.

A lack of memory speaks first, whatever raised it: NCCL's ``DistBackendError`` for an allocation of its own is no
failure of communication. Memory that could not be pinned is the host's, though CUDA says the same as for the device's.
"""

from __future__ import annotations

import errno
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from optuna_dsat.outcome import Outcome

__all__ = ["Diagnosis", "diagnose", "format_traceback", "missing_bytes", "without_runtime_frames"]

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ALLOCATION = re.compile(
    r"(?:allocate|[cm]?alloc|requested size:)(?: async)? ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE
)
"""``tried to allocate N bytes`` (CPU), ``Tried to allocate 2.00 GiB`` and ``Requested size: 2.00 GiB`` (CUDA), NumPy's
like, ``Failed to CUDA calloc N bytes`` (NCCL).
"""

_HOST_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "Failed to malloc ",  # NCCL
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
)
_PINNED_BY_NCCL = "Failed to CUDA host alloc"
_PINNED_MEMORY = re.compile(
    r"(?:cuda|hip)(?:Host(?:Alloc|Malloc|Register)|MallocHost)|cuMemHost|pin(?:ned)?[ _]memory(?! ?= ?False)",
    re.IGNORECASE,
)
"""Messages, and lines of code, that speak of pinned memory."""
_PINNING_FUNCTIONS = re.compile(r"(?:^|_)(?:pin_memory|pin_fresh|pin_empty|empty_pinned)")
"""Functions that pin memory: torch's ``pin_memory``, and those of DeepSpeed's accelerator."""
_PINNING_FRAMES = 3
"""Innermost frames whose line of code may ask for pinned memory: torch's and DeepSpeed's wrappers stand between."""
_ALLOCATION_FAILED = re.compile(
    r"out of memory|(?:can't|cannot|could not|failed to|unable to) (?:allocate|lock|pin)|OS call failed", re.IGNORECASE
)
"""What is said where memory cannot be pinned; ``OS call failed``: the limit on locked memory (DeepSpeed issue 3335)."""
_DEVICE_MEMORY = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory"
    r"|(?:CUDA|HIP|XPU)(?: driver| runtime)? error(?: ?\([^)\n]*\))? ?: out of memory"
    r"|CUDA failed with error(?: \d+)? out of memory"
    r"|Triton Error \[\w+\]: out of memory"
    r"|(?:Cuda|HIP) failure (?:\d+ )?'out of memory'"  # NCCL and RCCL, inside their own error
    r"|Failed to CUDA [cm]alloc"
    r"|(?:CU|HIP|ROC)[A-Z]+_(?:STATUS_)?(?:INTERNAL_ERROR_DEVICE_)?ALLOC(?:ATION)?_FAILED"
    r"|cuBLAS Error: the resource allocation failed"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY",
    re.IGNORECASE,
)
_HANDLE_CREATION_FAILED = re.compile(r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED")
"""Most often no memory was left for a library's handle (lm-evaluation-harness issue 1689, LLaVA issue 392); a GPU that
the library was not built for and a kernel that failed before say the same.
"""
_UNSPECIFIED_CUDA_ERROR = re.compile(r"unhandled cuda error(?!.*Cuda failure)", re.IGNORECASE | re.DOTALL)
"""NCCL before 2.13, which does not say which call failed."""
_LOW_MEMORY_BYTES = 512 * 2**20
"""Free device memory that may be too little for a library's handle and the kernels that it loads with it."""
_SYSTEM_MEMORY = ("Cannot allocate memory", "Resource temporarily unavailable", "can't start new thread")
"""What the system says when it has no memory for a mapping or for a thread's stack."""
_COMMUNICATION = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL error",
    "NCCL Error",
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What one exception speaks for."""

    outcome: Outcome
    missing_bytes: int | None
    """Bytes of the allocation that failed, where the error tells."""


def diagnose(error: BaseException, *, phase: str, device: str, limited: bool) -> Diagnosis:
    """Return what an exception speaks for.

    Args:
        error: The exception that reached the top of the script. What it was raised from counts too: a lack of
            memory behind it is the cause.
        phase: Where the rank was (``RankFailed.phase``).
        device: ``cuda`` or ``cpu``, empty before DeepSpeed was imported.
        limited: Whether a limit on this rank's host memory is in force (``--device-memory`` on CPU).
    """
    on_cpu = device == "cpu"
    for link in _exception_chain(error):
        memory = _memory_outcome(link, on_cpu=on_cpu, limited=limited)
        if memory is not None:
            return Diagnosis(outcome=memory, missing_bytes=missing_bytes(str(link)))
    if any(_is_communication(link, phase) for link in _exception_chain(error)):
        return Diagnosis(outcome=Outcome.COMMUNICATION_ERROR, missing_bytes=None)
    if _is_config_rejection(error, phase):
        return Diagnosis(outcome=Outcome.INVALID_CONFIG, missing_bytes=None)
    return Diagnosis(outcome=Outcome.SCRIPT_ERROR, missing_bytes=None)


def missing_bytes(message: str) -> int | None:
    """Return the bytes that an allocator's message says it could not get, None where it says nothing."""
    found = _ALLOCATION.search(message)
    if found is None:
        return None
    unit = next(size for name, size in _UNITS.items() if name.lower() == found[2].lower())
    return round(float(found[1].rstrip(".")) * unit)


def without_runtime_frames(trace: TracebackType | None, runtime_dir: str) -> TracebackType | None:
    """Return a traceback from the script's first frame on, as Python would show it without the runtime."""
    here = trace
    while here is not None:
        filename = here.tb_frame.f_code.co_filename
        if not filename.startswith((runtime_dir, "<frozen runpy>")) and not filename.endswith("/runpy.py"):
            return here
        here = here.tb_next
    return trace


def format_traceback(error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback as Python prints it."""
    return "".join(traceback.format_exception(type(error), error, trace))


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _memory_outcome(error: BaseException, *, on_cpu: bool, limited: bool) -> Outcome | None:
    host = Outcome.OUT_OF_MEMORY if on_cpu else Outcome.HOST_OUT_OF_MEMORY
    message = str(error)
    if isinstance(error, _torch_types("OutOfMemoryError", "cuda.OutOfMemoryError")):
        return Outcome.OUT_OF_MEMORY
    if isinstance(error, MemoryError):  # NumPy's _ArrayMemoryError is one
        return host
    if isinstance(error, OSError):
        starved = error.errno == errno.ENOMEM or (limited and error.errno == errno.EAGAIN)
        return host if starved else None
    if isinstance(error, SystemError):
        # Under a tight limit, C code that cannot allocate sometimes forgets to say so.
        return host if limited and "without exception set" in message else None
    if not isinstance(error, RuntimeError):
        return None
    if any(sign in message for sign in _HOST_MEMORY):
        return host
    if _PINNED_BY_NCCL in message or (_ALLOCATION_FAILED.search(message) and _is_pinned_allocation(error)):
        return Outcome.HOST_OUT_OF_MEMORY
    if _DEVICE_MEMORY.search(message) or _implies_out_of_memory(message):
        return Outcome.OUT_OF_MEMORY
    if any(sign in message for sign in _SYSTEM_MEMORY):
        return host if limited or "Cannot allocate memory" in message else None
    return None


def _is_pinned_allocation(error: BaseException) -> bool:
    """Whether the allocation that failed was of pinned host memory: CUDA says the same for both."""
    if _PINNED_MEMORY.search(str(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if any(_PINNING_FUNCTIONS.search(frame.name) for frame in frames):
        return True
    return any(_PINNED_MEMORY.search(_source_of(frame)) for frame in frames[-_PINNING_FRAMES:])


def _source_of(frame: traceback.FrameSummary) -> str:
    """Return the lines of the statement that a frame was at."""
    first = frame.lineno or 0
    lines = range(first, (frame.end_lineno or first) + 1)
    return "".join(linecache.getline(frame.filename, line) for line in lines)


def _implies_out_of_memory(message: str) -> bool:
    """Whether an error that does not say so comes of a full device.

    A missing handle counts as that unless the device is known to have room, an unexplained error of NCCL only where
    the device is known to be full.
    """
    if _HANDLE_CREATION_FAILED.search(message):
        return _device_is_full() is not False
    return bool(_UNSPECIFIED_CUDA_ERROR.search(message)) and _device_is_full() is True


def _device_is_full() -> bool | None:
    """Return whether hardly any memory is left on this rank's device, None where that cannot be known."""
    torch: Any = sys.modules.get("torch")
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except RuntimeError as error:  # CUDA answers nothing any more, since a kernel failed before
        return "out of memory" in str(error)
    except Exception:  # noqa: BLE001 - another build or version of torch; the script's error must not be lost
        return None
    return bool(free_bytes < min(_LOW_MEMORY_BYTES, total_bytes // 10))


def _is_communication(error: BaseException, phase: str) -> bool:
    if isinstance(error, _torch_types("distributed.DistError", "distributed.DistBackendError")):
        return True
    if isinstance(error, _torch_types("distributed.DistNetworkError", "distributed.DistStoreError")):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return phase != "script" and phase != "between"  # elsewhere it is the script's own connection
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _COMMUNICATION)


def _is_config_rejection(error: BaseException, phase: str) -> bool:
    """Whether DeepSpeed refused the configuration.

    Inside ``deepspeed.initialize`` every error is taken for one, but a missing module: DeepSpeed refuses with
    pydantic's ValidationError, its own errors, assertions, ValueError, TypeError (optimizer arguments) and
    failing builds alike.
    """
    if phase == "initialize":
        return not isinstance(error, ImportError)
    names = {cls.__name__ for cls in type(error).__mro__}
    return not names.isdisjoint(("DeepSpeedConfigError", "ZeRORuntimeException"))


def _torch_types(*names: str) -> tuple[type[BaseException], ...]:
    """Return the named exception types of torch, none where the script has not imported it."""
    torch = sys.modules.get("torch")
    found = []
    for name in names:
        value: object = torch
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, type) and issubclass(value, BaseException):
            found.append(value)
    return tuple(found)
