"""The devices of this machine: GPUs as NVML sees them, or ranks on the CPU.

Never imports torch and never makes a CUDA context: the tuner must not take memory from what it measures.

The NVML part is written from NVIDIA's NVML documentation and tested with a substitute module; it has not been run on a
machine with a GPU yet.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from optuna_dsat.errors import DsatError, UsageError

__all__ = [
    "Device",
    "DeviceError",
    "Devices",
    "Nvml",
    "NvmlError",
    "cpu_devices",
    "detect_devices",
    "host_memory_bytes",
]

DEFAULT_CPU_RANKS = 2
"""Ranks of a launch on a machine without a GPU: the fewest at which ZeRO partitions anything."""

_DRIVER = Path("/proc/driver/nvidia/version")
"""Exists while NVIDIA's kernel driver is loaded."""

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Memory limit of a container: control groups version 2, then 1."""


class DeviceError(DsatError):
    """The devices of this machine cannot be used: the driver does not answer, or a GPU is not free when it must be."""


class NvmlError(DeviceError):
    """NVML refused a question, or is not there."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or one rank's share of the CPU."""

    index: int
    """NVML's index of a GPU (``nvidia-smi``'s number); CPU ranks count from 0."""
    visible_id: str
    """What ``CUDA_VISIBLE_DEVICES`` calls it; empty on the CPU."""
    name: str
    memory_bytes: int
    """All memory of the GPU, or an equal share of the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What launches may run on."""

    kind: str
    """``cuda`` or ``cpu``."""
    devices: tuple[Device, ...]
    host_memory_bytes: int

    @property
    def indices(self) -> tuple[int, ...]:
        """Index of each device."""
        return tuple(device.index for device in self.devices)


class Nvml:
    """All that is asked of NVML (package ``nvidia-ml-py``, module ``pynvml``). Every failure is an ``NvmlError``.

    Args:
        module: A stand-in for ``pynvml``, for tests; None imports the real one.

    Raises:
        NvmlError: If the package or the driver's library is missing.
    """

    def __init__(self, module: Any = None) -> None:
        try:
            self._module = importlib.import_module("pynvml") if module is None else module
        except ImportError as error:
            raise NvmlError("the package nvidia-ml-py is not installed") from error
        self._call("nvmlInit")
        self._handles: dict[str, Any] = {}

    def _call(self, function: str, *args: Any) -> Any:
        try:
            return getattr(self._module, function)(*args)
        except self._module.NVMLError as error:
            raise NvmlError(f"{function}: {error}") from error

    def _handle(self, visible_id: str) -> Any:
        if visible_id not in self._handles:
            self._handles[visible_id] = (
                self._call("nvmlDeviceGetHandleByIndex", int(visible_id))
                if visible_id.isdigit()
                else self._call("nvmlDeviceGetHandleByUUID", visible_id)
            )
        return self._handles[visible_id]

    def count(self) -> int:
        """Return the number of GPUs of the machine."""
        return int(self._call("nvmlDeviceGetCount"))

    def driver_version(self) -> str:
        """Return the version of the NVIDIA driver."""
        version = self._call("nvmlSystemGetDriverVersion")
        return version.decode() if isinstance(version, bytes) else str(version)

    def device(self, visible_id: str, index: int | None = None) -> Device:
        """Return a GPU by its number or UUID; ``index`` overrides NVML's own (a part of a GPU has none)."""
        handle = self._handle(visible_id)
        name = self._call("nvmlDeviceGetName", handle)
        return Device(
            index=int(self._call("nvmlDeviceGetIndex", handle)) if index is None else index,
            visible_id=visible_id,
            name=name.decode() if isinstance(name, bytes) else str(name),
            memory_bytes=int(self._call("nvmlDeviceGetMemoryInfo", handle).total),
        )

    def used_bytes(self, device: Device) -> int:
        """Return the memory in use on a GPU, by anyone."""
        return int(self._call("nvmlDeviceGetMemoryInfo", self._handle(device.visible_id)).used)

    def processes(self, device: Device) -> dict[int, int]:
        """Return the compute processes on a GPU: process number -> bytes it uses (0 where NVML does not say).

        Inside a container the list may be empty, or hold numbers of the host. A desktop's processes, which may count
        as graphics and compute at once, are left out.
        """
        handle = self._handle(device.visible_id)
        compute = self._call("nvmlDeviceGetComputeRunningProcesses", handle)
        graphics = {int(process.pid) for process in self._call("nvmlDeviceGetGraphicsRunningProcesses", handle)}
        return {
            int(process.pid): int(process.usedGpuMemory or 0) for process in compute if int(process.pid) not in graphics
        }


def host_memory_bytes() -> int:
    """Return the memory this machine, or the container it is, may use."""
    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_devices(ranks: int) -> Devices:
    """Return ``ranks`` equal shares of this machine's CPU and memory.

    Raises:
        UsageError: If ``ranks`` is less than 1.
    """
    if ranks < 1:
        raise UsageError(f"There must be at least one rank; got {ranks}. Give --cpu-ranks 1 or more.")
    memory, name = host_memory_bytes(), _cpu_name()
    return Devices(
        kind="cpu",
        devices=tuple(Device(index=i, visible_id="", name=name, memory_bytes=memory // ranks) for i in range(ranks)),
        host_memory_bytes=memory,
    )


def _visible_ids(environ: Mapping[str, str], count: int) -> list[str]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` lets through, as CUDA reads it: up to the first invalid entry."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return [str(i) for i in range(count)]
    ids: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        number = entry.isdigit() and int(entry) < count
        if not number and not entry.startswith(("GPU-", "MIG-")):
            break
        ids.append(str(int(entry)) if number else entry)
    return ids


def detect_devices(
    *, environ: Mapping[str, str] | None = None, nvml: Nvml | None = None, cpu_ranks: int | None = None
) -> Devices:
    """Return the GPUs that this process may use, or CPU ranks where there is none.

    ``CUDA_VISIBLE_DEVICES`` is honoured. Its numbers are taken in the order of the PCI bus, which is also the order
    given to launches (``CUDA_DEVICE_ORDER=PCI_BUS_ID``); CUDA's own default differs only between unlike GPUs.

    Args:
        environ: Environment to read, this process's for None.
        nvml: NVML to ask, the machine's for None.
        cpu_ranks: Ranks to offer where there is no GPU; None for 2.

    Raises:
        DeviceError: If the NVIDIA driver is loaded but does not answer.
        UsageError: If ``cpu_ranks`` is less than 1.
    """
    environ = os.environ if environ is None else environ
    cpu = cpu_devices(DEFAULT_CPU_RANKS if cpu_ranks is None else cpu_ranks)
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or environ.get("DS_ACCELERATOR") == "cpu":
        return cpu
    try:
        nvml = Nvml() if nvml is None else nvml
        ids = _visible_ids(environ, nvml.count())
        found = tuple(
            nvml.device(one, index=position if one.startswith("MIG-") else None) for position, one in enumerate(ids)
        )
    except NvmlError as error:
        if not _DRIVER.exists():
            return cpu
        raise DeviceError(
            f"The NVIDIA driver is loaded but does not answer ({error}). Repair it (try nvidia-smi), "
            "or set CUDA_VISIBLE_DEVICES= (empty) to tune on the CPU."
        ) from error
    return Devices(kind="cuda", devices=found, host_memory_bytes=cpu.host_memory_bytes) if found else cpu
