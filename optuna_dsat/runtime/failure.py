"""From an exception to the outcome that a rank's record speaks for.

The type decides first. Messages are read only where torch, gloo and CUDA raise a bare ``RuntimeError``: the
exception's own message, never a log. The messages were collected from torch 2.13 and DeepSpeed 0.19.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from optuna_dsat.outcome import Outcome

__all__ = ["Diagnosis", "diagnose", "format_traceback", "missing_bytes", "without_runtime_frames"]

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ALLOCATION = re.compile(r"allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
"""``tried to allocate N bytes`` (CPU), ``Tried to allocate 2.00 GiB`` (CUDA) and NumPy's like."""

_HOST_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
)
_PINNED_MEMORY = ("cudaHostAlloc", "cudaHostRegister", "pin_memory", "pinned memory")
_DEVICE_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Failed to CUDA malloc",
    "Cuda failure 2 'out of memory'",
)
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
    for link in _chain(error):
        memory = _memory(link, on_cpu=on_cpu, limited=limited)
        if memory is not None:
            return Diagnosis(outcome=memory, missing_bytes=missing_bytes(str(link)))
    if any(_is_communication(link, phase) for link in _chain(error)):
        return Diagnosis(outcome=Outcome.COMMUNICATION_ERROR, missing_bytes=None)
    if _is_refusal(error, phase):
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


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _memory(error: BaseException, *, on_cpu: bool, limited: bool) -> Outcome | None:
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
    if any(sign in message for sign in _DEVICE_MEMORY):
        return Outcome.HOST_OUT_OF_MEMORY if _pins(error) else Outcome.OUT_OF_MEMORY
    if any(sign in message for sign in _PINNED_MEMORY) and "memory" in message:
        return Outcome.HOST_OUT_OF_MEMORY
    if any(sign in message for sign in _SYSTEM_MEMORY):
        return host if limited or "Cannot allocate memory" in message else None
    return None


def _pins(error: BaseException) -> bool:
    """Whether the allocation that failed was of pinned host memory: CUDA says the same for both."""
    if any(sign in str(error) for sign in _PINNED_MEMORY):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "pin_memory" in f"{frames[-1].name} {frames[-1].line or ''}"


def _is_communication(error: BaseException, phase: str) -> bool:
    if isinstance(error, _torch_types("distributed.DistError", "distributed.DistBackendError")):
        return True
    if isinstance(error, _torch_types("distributed.DistNetworkError", "distributed.DistStoreError")):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return phase != "script" and phase != "between"  # elsewhere it is the script's own connection
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _COMMUNICATION)


def _is_refusal(error: BaseException, phase: str) -> bool:
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
