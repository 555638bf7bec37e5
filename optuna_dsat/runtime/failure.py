"""Classifies an exception as an outcome.

The exception's type is checked first. Its message (never a log) is read only for ``RuntimeError``, which torch, gloo,
NCCL, Triton and the CUDA libraries raise for any failure, and for a device's out-of-memory, which scripts re-raise in
exceptions of their own. The messages were collected from torch 2.13, NCCL 2.29, cuDNN 9, Triton 3 and DeepSpeed 0.19,
and from issues of projects that use them.

Out-of-memory takes precedence over the exception's type: NCCL's ``DistBackendError`` for a failed allocation is not a
communication error. Failure to pin memory is host out-of-memory, although CUDA reports it like device out-of-memory.
"""

from __future__ import annotations

import errno
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.adapt.checkpointing import CheckpointingError
from optuna_dsat.runtime.files import shortened

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ALLOCATION = re.compile(
    r"(?:allocate|[cm]?alloc|requested size:)(?: async)? ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE
)
"""``tried to allocate N bytes`` (CPU, NumPy), ``Tried to allocate 2.00 GiB`` and ``Requested size: 2.00 GiB`` (CUDA),
``Failed to CUDA calloc N bytes`` (NCCL).
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
"""Matches messages and source lines that mention pinned memory."""
_PINNING_FUNCTIONS = re.compile(r"(?:^|_)(?:pin_memory|pin_fresh|pin_empty|empty_pinned)")
"""Matches names of functions that pin memory, in torch (``pin_memory``) and DeepSpeed's accelerator."""
_PINNING_FRAMES = 3
"""Innermost frames whose source may request pinned memory; torch's and DeepSpeed's wrappers add frames."""
_ALLOCATION_FAILED = re.compile(
    r"out of memory|(?:can't|cannot|could not|failed to|unable to) (?:allocate|lock|pin)|OS call failed", re.IGNORECASE
)
"""Messages when memory cannot be pinned; ``OS call failed``: the limit on locked memory (DeepSpeed issue 3335)."""
_LOOKED_AT_CHARS = 16_000
"""Maximum length of an error's text that is searched for causes and secrets; more takes seconds and is not stored."""

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
"""Usually the device has no memory for a library's handle (lm-evaluation-harness issue 1689, LLaVA issue 392); an
unsupported GPU and an earlier kernel failure cause the same message.
"""
_UNSPECIFIED_CUDA_ERROR = re.compile(r"unhandled cuda error(?!.*Cuda failure)", re.IGNORECASE | re.DOTALL)
"""NCCL before 2.13 does not name the call that failed."""
_LOW_MEMORY_BYTES = 512 * 2**20
"""Free device memory below which a library's handle and kernels may not fit."""
_SYSTEM_MEMORY = ("Cannot allocate memory", "Resource temporarily unavailable", "can't start new thread")
"""Operating-system messages when a mapping or a thread's stack cannot be allocated."""
_DISTRIBUTED_ERRORS = tuple(f"distributed.Dist{kind}Error" for kind in ("", "Backend", "Network", "Store"))
_COMMUNICATION = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL error",
    "NCCL Error",
)

_BUILD_FAILED = re.compile(r"Error building extension '[^']*'")
"""``torch.utils.cpp_extension``; the output of ninja follows."""
_BUILD_CAUSES = (
    re.compile(r"^(?:/bin/sh: (?:\d+: |line \d+: )?)?(\S+: (?:command )?not found)$", re.MULTILINE),
    re.compile(r"((?:fatal )?error: .*)$", re.MULTILINE),
)
"""Match a missing compiler, else the first error of a compiler or linker."""


_SCHEDULE_ENDED = re.compile(r"Tried to step \d+ times\. The specified number of total steps is \d+")
"""``OneCycleLR`` of torch, made for fewer steps than a launch takes: at a larger batch the data give no more."""


class TooFewSamplesError(ValueError):
    """The training data are fewer than a batch of the launch's size."""


@dataclass(frozen=True)
class Diagnosis:
    """Classification of an exception."""

    outcome: Outcome
    missing_bytes: int | None
    """Bytes of the failed allocation; None if the error does not state them."""


def diagnose(error: BaseException, *, phase: str, device: str, limited: bool) -> Diagnosis:
    """Return the classification of the script's uncaught exception.

    Its causes are checked too: an out-of-memory error among them decides the outcome. ``phase`` is the rank's when it
    was raised (``RankFailed.phase``), ``device`` is empty before DeepSpeed was imported, and ``limited`` is whether
    this rank's host memory is limited (``--device-memory`` on CPU).
    """
    on_cpu = device == "cpu"
    for link in exception_chain(error):
        memory = _memory_outcome(link, on_cpu=on_cpu, limited=limited)
        if memory is not None:
            return Diagnosis(outcome=memory, missing_bytes=missing_bytes(message_of(link)))
    if any(_is_communication(link, phase) for link in exception_chain(error)):
        return Diagnosis(outcome=Outcome.COMMUNICATION_ERROR, missing_bytes=None)
    # An iterator of the script may be exhausted, e.g. a loader that drops its only, incomplete batch.
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    is_over = isinstance(error, ValueError) and _SCHEDULE_ENDED.match(message_of(error))
    if is_over or isinstance(error, TooFewSamplesError) or isinstance(cause, StopIteration):
        return Diagnosis(outcome=Outcome.OUT_OF_DATA, missing_bytes=None)
    if isinstance(error, CheckpointingError) or _is_config_rejection(error, phase):
        return Diagnosis(outcome=Outcome.INVALID_CONFIG, missing_bytes=None)
    return Diagnosis(outcome=Outcome.SCRIPT_ERROR, missing_bytes=None)


def missing_bytes(message: str) -> int | None:
    """Return the size of the failed allocation in an allocator's message, in bytes; None if not stated."""
    match = _ALLOCATION.search(message)
    if match is None:
        return None
    unit = next(size for name, size in _UNITS.items() if name.lower() == match[2].lower())
    return round(float(match[1].rstrip(".")) * unit)


def without_runtime_frames(trace: TracebackType | None, runtime_dir: str) -> TracebackType | None:
    """Return the traceback as Python shows it without the runtime, unless that raised the error."""
    kept = []
    here = trace
    while here is not None:
        filename = here.tb_frame.f_code.co_filename
        if not filename.startswith((runtime_dir, "<frozen runpy>")) and not filename.endswith("/runpy.py"):
            kept.append(here)
        here = here.tb_next
    for outer, inner in zip(kept, kept[1:]):
        outer.tb_next = inner
    return kept[0] if kept else trace


def message_of(error: BaseException) -> str:
    """Return an error's message, shortened if very long; the error's type if its ``__str__`` fails."""
    try:
        return shortened(str(error), _LOOKED_AT_CHARS)
    except Exception:  # noqa: BLE001 - the script's own method; its error is the one to record
        return f"<{type(error).__name__} without a message that can be read>"


def message_with_cause(error: BaseException) -> str:
    """Return an error's message; for failed operator builds, without the compiler's command lines.

    An error without a message, as of a plain ``assert``, is described by the line that raised it.
    """
    message = message_of(error)
    for link in exception_chain(error):
        text = message_of(link)
        if built := _BUILD_FAILED.match(text):
            reason = next((match[1] for cause in _BUILD_CAUSES if (match := cause.search(text))), "see the log")
            whole = f"{built[0]}: {reason.strip()}"
            return whole if link is error else f"{message.rstrip('.')}: {whole}"
    cause = error.__cause__
    if cause and ("failed to build" in message or "exited unexpectedly" in message):  # of an operator, of a worker
        return f"{message.rstrip('.')}: {message_of(cause).strip()}"
    frames = [] if message.strip() else traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else message


def format_traceback(error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback as Python prints it, shortened if very long."""
    return shortened("".join(traceback.format_exception(type(error), error, trace)), _LOOKED_AT_CHARS)


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it, also where ``from None`` hides them."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _memory_outcome(error: BaseException, *, on_cpu: bool, limited: bool) -> Outcome | None:
    host = Outcome.OUT_OF_MEMORY if on_cpu else Outcome.HOST_OUT_OF_MEMORY
    message = message_of(error)
    if isinstance(error, _torch_types("OutOfMemoryError", "cuda.OutOfMemoryError")):
        return Outcome.OUT_OF_MEMORY
    if isinstance(error, MemoryError):  # includes NumPy's _ArrayMemoryError
        return host
    if isinstance(error, OSError):
        starved = error.errno == errno.ENOMEM or (limited and error.errno == errno.EAGAIN)
        return host if starved else None
    if isinstance(error, SystemError):
        # Under a tight limit, C code that fails to allocate sometimes returns without setting an exception.
        return host if limited and "without exception set" in message else None
    if not isinstance(error, RuntimeError):
        return Outcome.OUT_OF_MEMORY if _DEVICE_MEMORY.search(message) else None
    if any(sign in message for sign in _HOST_MEMORY):
        return host
    if _PINNED_BY_NCCL in message or (_ALLOCATION_FAILED.search(message) and _is_pinned_allocation(error)):
        return Outcome.HOST_OUT_OF_MEMORY
    if (
        _DEVICE_MEMORY.search(message)
        # A failed handle creation counts unless the device is known to have free memory.
        or (_HANDLE_CREATION_FAILED.search(message) and _device_is_full() is not False)
        # An unspecified NCCL error counts only if the device is known to be full.
        or (_UNSPECIFIED_CUDA_ERROR.search(message) and _device_is_full() is True)
    ):
        return Outcome.OUT_OF_MEMORY
    if any(sign in message for sign in _SYSTEM_MEMORY):
        return host if limited or "Cannot allocate memory" in message else None
    return None


def _is_pinned_allocation(error: BaseException) -> bool:
    """Return whether the failed allocation was of pinned host memory; CUDA's message is the same for device memory."""
    if _PINNED_MEMORY.search(message_of(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if any(_PINNING_FUNCTIONS.search(frame.name) for frame in frames):
        return True
    for frame in frames[-_PINNING_FRAMES:]:
        first = frame.lineno or 0
        lines = range(first, (getattr(frame, "end_lineno", None) or first) + 1)  # since Python 3.11
        if _PINNED_MEMORY.search("".join(linecache.getline(frame.filename, line) for line in lines)):
            return True
    return False


def _device_is_full() -> bool | None:
    """Return whether this rank's device has almost no free memory; None if unknown."""
    torch: Any = sys.modules.get("torch")
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except RuntimeError as error:  # CUDA's context is unusable since a kernel failed
        return "out of memory" in str(error)
    except Exception:  # noqa: BLE001 - another build or version of torch; the script's error must not be lost
        return None
    return bool(free_bytes < min(_LOW_MEMORY_BYTES, total_bytes // 10))


def _is_communication(error: BaseException, phase: str) -> bool:
    if isinstance(error, _torch_types(*_DISTRIBUTED_ERRORS)):
        return True
    if isinstance(error, (ConnectionError, TimeoutError)):
        return phase != "script" and phase != "between"  # elsewhere it is a connection of the script
    return isinstance(error, RuntimeError) and any(sign in message_of(error) for sign in _COMMUNICATION)


def _is_config_rejection(error: BaseException, phase: str) -> bool:
    """Return whether DeepSpeed rejected the configuration: inside ``initialize``, by any error but an ImportError."""
    if phase == "initialize":
        return not isinstance(error, ImportError)
    names = {cls.__name__ for cls in type(error).__mro__}
    return not names.isdisjoint(("DeepSpeedConfigError", "ZeRORuntimeException"))


def _torch_types(*names: str) -> tuple[type[BaseException], ...]:
    """Return torch's exception types of these names; empty if the script has not imported torch."""
    torch = sys.modules.get("torch")
    result = []
    for name in names:
        value: object = torch
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, type) and issubclass(value, BaseException):
            result.append(value)
    return tuple(result)


_RULES = (
    (r"greater than or equal to (\S+)", r"at least \1"),
    (r"less than or equal to (\S+)", r"at most \1"),
    (r"greater than (\S+)", r"above \1"),
    (r"less than (\S+)", r"below \1"),
    (r"a valid number\b.*", "a number"),
    (r"a valid integer\b.*", "a whole number"),
    (r"a valid boolean\b.*", "true or false"),
    (r"a valid string\b.*", "text"),
)
"""Messages of pydantic (and of typer through it) about invalid input -> readable wording."""
_TWICE = re.compile(r", (\S+) or \1$")
"""The end of choices of which the last has two names, as the ZeRO stages in DeepSpeed's config."""


def rule_in_words(message: str) -> str:
    """Return a message of pydantic (possibly wrapped by typer) as a rule: ``it must be at least 1``."""
    before, result, rule = message.replace("Value error, ", "").rpartition("Input should be ")
    if not result:
        return rule
    rule = _TWICE.sub(r" or \1", rule)
    for pattern, words in _RULES:
        if re.match(pattern, rule):
            return f"{before}it must be {re.sub(pattern, words, rule, count=1)}"
    return f"{before}it must be {rule}"


_VALIDATION = re.compile(r"\d+ validation errors? for (\w+)")
_REASON = re.compile(
    r"\s+(?P<text>.*?)(?: \[type=(?P<type>\w+), input_value=(?P<value>.*), input_type=(?P<of>\w+)\])?$"
)
"""Matches pydantic's line below the name of a field."""
_SECTIONS = {
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "CommsLoggerConfig": "comms_logger",
    "CompileConfig": "compile",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedMonitorConfig": "",
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "HybridEngineConfig": "hybrid_engine",
    "TPTrainingConfig": "tensor_parallel",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "ZenFlowConfig": "zero_optimization.zenflow",
}
"""DeepSpeed 0.19 class that validates a section -> the section's key."""
_LONGEST = 400
"""Maximum characters of a line."""
_TRACEBACK = "Traceback (most recent call last):\n"
_IN_WORKER = f"\nOriginal {_TRACEBACK}"
"""Part of torch's message for an error that was raised in another process or thread (``torch._utils``)."""


def failure_line(message: str) -> str:
    """Return an exception's message in a single line.

    For a validation error, this contains the keys, their values and the reasons; for an error in a worker, its message.
    A first line that ends with a colon is followed by the other lines.
    """
    if refused := list(refused_values(message)):
        texts = [f"{key} is {value}: {reason}" if value else f"{key}: {reason}" for key, value, reason in refused]
        return shortened("; ".join(texts), _LONGEST)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        listed = "; ".join(line.removeprefix("- ") for line in lines[1:])
        return shortened(f"{lines[0]} {listed}".rstrip(".: "), _LONGEST)
    first = lines[0].rstrip(".") if lines else ""
    if _IN_WORKER in message:
        below = message.rpartition(_TRACEBACK)[2].splitlines()
        raised = next((line for line in below if line and not line[0].isspace()), "")
        return shortened(f"{first}: {raised}".rstrip(".: "), _LONGEST)
    return first


def refused_values(message: str) -> Iterator[tuple[str, str, str]]:
    """Yield dotted key, value and reason for each value in a validation error of DeepSpeed's config."""
    first, *lines = message.splitlines() or [""]
    model = _VALIDATION.match(first)
    if model is None:
        return
    section = _SECTIONS.get(model[1], model[1])
    key: str | None = section
    for line in lines:
        if line and not line[0].isspace():
            key = ".".join(filter(None, (section, line)))
        elif key is not None and (match := _REASON.match(line)):
            unknown = match["type"] == "extra_forbidden"
            has_value = match["value"] and match["of"] != "dict" and not unknown
            reason = "DeepSpeed has no such key" if unknown else rule_in_words(match["text"])
            if key != key.strip():
                key, reason = repr(key), f"{reason}: remove the blank at its end"
            yield key, match["value"] if has_value else "", reason
            key = None  # the next line contains further information
