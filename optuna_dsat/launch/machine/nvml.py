"""Queries to NVML, NVIDIA's management library for GPUs; each returns a value or raises ``NvmlError``.

Written from NVIDIA's NVML documentation. A value is absent if the machine cannot report it: WSL, virtual GPUs, MIG and
GPUs that share the host's memory do not support every query, and permissions or an older driver may forbid it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from optuna_dsat.errors import DsatError

DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 9, 12
"""Values of ``nvmlReturn_t``."""

_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND = 3, 4, 13
_ARGUMENT_VERSION_MISMATCH, _DEPRECATED = 25, 26
_CANNOT_BE_HAD = frozenset(
    {None, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH, _DEPRECATED}
)
"""Codes that concern the query, not the GPU's health; None: another version of ``pynvml`` failed itself."""

_UNNAMED = "NVIDIA GPU"

_CLOCKS = {1: "SM", 2: "memory"}
"""``nvmlClockType_t`` (NVML API reference)."""

_THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""``nvmlClocksEventReasons`` (NVML API reference), excluding idleness, clocks set by the user and display clocks."""


class DeviceError(DsatError):
    """The devices of this machine cannot be used: the driver does not answer, or a GPU is not free when it must be."""


class NvmlError(DeviceError):
    """NVML is missing or rejected a query.

    Attributes:
        code: NVML's error code (``nvmlReturn_t``); None if the error is not from NVML.
    """

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """Identity and size of a GPU or MIG instance."""

    index: int | None
    """NVML's index; None for a MIG instance, which has none."""
    uuid: str
    """Empty if NVML does not report it."""
    name: str
    memory_bytes: int | None
    """None if NVML does not report it: the GPU shares the host's memory, or the query is not permitted."""


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Use of a GPU at a point in time."""

    used_bytes: int | None
    """Memory in use by all processes; None if NVML does not report it."""
    processes: Mapping[int, int] | None
    """Compute processes: PID -> bytes in use, 0 if NVML does not report them; None if NVML lists no processes. Inside a
    container the list may be empty or contain PIDs of the host. Processes that also count as graphics, such as a
    desktop's, are excluded."""


class Nvml:
    """Interface to NVML (package ``nvidia-ml-py``, module ``pynvml``). Every failure is an ``NvmlError``.

    GPUs are identified by index, as text, or by UUID.

    Raises:
        NvmlError: If the package or the driver's library is missing, or does not respond.
    """

    def __init__(self, module: Any = None) -> None:
        try:
            self._module = importlib.import_module("pynvml") if module is None else module
        except ImportError as error:
            raise NvmlError("the package nvidia-ml-py is not installed") from error
        self._handles: dict[str, Any] = {}
        self._call("nvmlInit")

    def _call(self, function: str, *args: Any) -> Any:
        try:
            return getattr(self._module, function)(*args)
        except Exception as error:  # its errors have several bases, and a missing function is an AttributeError
            code = getattr(error, "value", None)
            raise NvmlError(f"{function}: {error}", code=code if isinstance(code, int) else None) from error

    def _handle(self, gpu: str) -> Any:
        if gpu not in self._handles:
            self._handles[gpu] = (
                self._call("nvmlDeviceGetHandleByIndex", int(gpu))
                if gpu.isdigit()
                else self._call("nvmlDeviceGetHandleByUUID", gpu)
            )
        return self._handles[gpu]

    def _ask(self, function: str, *args: Any) -> Any:
        """Return the result of a query; None if this machine does not support it."""
        try:
            return self._call(function, *args)
        except NvmlError as error:
            if error.code in _CANNOT_BE_HAD:
                return None
            raise

    def count(self) -> int:
        """Return the number of GPUs of the machine."""
        return int(self._call("nvmlDeviceGetCount"))

    def driver_version(self) -> str:
        """Return the version of the NVIDIA driver."""
        return _text(self._call("nvmlSystemGetDriverVersion"))

    def uuid(self, index: int) -> str:
        """Return the UUID of a GPU; empty if it is not available."""
        try:
            return _text(self._ask("nvmlDeviceGetUUID", self._handle(str(index))) or "")
        except NvmlError:
            return ""

    def facts(self, gpu: str) -> GpuFacts:
        """Return identity and size of a GPU."""
        handle = self._handle(gpu)
        index = self._ask("nvmlDeviceGetIndex", handle)
        name = self._ask("nvmlDeviceGetName", handle)
        uuid = self._ask("nvmlDeviceGetUUID", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return GpuFacts(
            index=None if index is None else int(index),
            uuid=_text(uuid or ""),
            name=_text(name or _UNNAMED),
            memory_bytes=None if memory is None else int(memory.total),
        )

    def use(self, gpu: str) -> GpuUse:
        """Return the use of a GPU."""
        handle = self._handle(gpu)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return GpuUse(used_bytes=None if memory is None else int(memory.used), processes=self._processes(handle))

    def _processes(self, handle: Any) -> dict[int, int] | None:
        """Return the compute processes and their bytes; None if they are not listed."""
        try:
            compute = self._call("nvmlDeviceGetComputeRunningProcesses", handle)
        except NvmlError:
            return None
        try:
            graphics = {int(item.pid) for item in self._call("nvmlDeviceGetGraphicsRunningProcesses", handle)}
        except NvmlError:
            graphics = set()
        return {
            int(item.pid): int(getattr(item, "usedGpuMemory", None) or 0)
            for item in compute
            if int(item.pid) not in graphics
        }

    def throttle_reasons(self, gpu: str) -> tuple[str, ...]:
        """Describe why a busy GPU's clocks are below their setting; empty if unknown."""
        handle = self._handle(gpu)
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if mask is None:  # the name in older versions of the package
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return tuple(words for bit, words in _THROTTLE_REASONS.items() if int(mask or 0) & bit)

    def limits(self, gpu: str) -> str:
        """Return the largest clocks and the power limit of a GPU in words; empty if unknown."""
        handle = self._handle(gpu)
        clocks = [(name, self._ask("nvmlDeviceGetMaxClockInfo", handle, kind)) for kind, name in _CLOCKS.items()]
        power_mw = self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        words = [f"{name} up to {int(mhz)} MHz" for name, mhz in clocks if mhz]
        return ", ".join([*words, *([f"power up to {int(power_mw) / 1000:.0f} W"] if power_mw else [])])

    def energy_j(self, gpu: str) -> float | None:
        """Return the energy used since the driver was loaded; None if unsupported, as by MIG and before Volta."""
        used_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle(gpu))
        return None if used_mj is None else int(used_mj) / 1000

    def process_name(self, pid: int) -> str:
        """Return the name of a process's program; empty if NVML does not report it."""
        try:
            return PurePosixPath(_text(self._call("nvmlSystemGetProcessName", pid)).partition(" ")[0]).name
        except NvmlError:
            return ""


def _text(answer: Any) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
