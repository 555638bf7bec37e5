"""The devices of this machine: GPUs reported by NVML, or ranks on the CPU.

Never imports torch and never creates a CUDA context: the tuner must not take memory from what it measures.
The NVML part has not been run on a machine with a GPU yet.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.accelerators import other_devices, refuse_other_builds
from optuna_dsat.launch.nvml import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, DeviceError, GpuFacts, Nvml, NvmlError
from optuna_dsat.launch.visible import VARIABLE, Visible, is_part, read_visible
from optuna_dsat.words import things_in_words

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
MOST_CPU_RANKS = 1024
"""Far more ranks than the cores of any machine train anything on."""
"""Ranks of a launch on a machine without a GPU: the smallest number at which ZeRO partitions anything."""

_DRIVER = Path("/proc/driver/nvidia/version")
"""Exists while NVIDIA's kernel driver is loaded, also in containers without a GPU."""

_CONTROL = Path("/dev/nvidiactl")
"""Exists if a process may use that driver."""

_ON_THE_CPU = f"or set {VARIABLE}= (empty) to tune on the CPU."

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with the memory limit of a container: control groups version 2, then 1."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, one MIG instance of a GPU, or one rank's share of the CPU."""

    index: int
    """NVML's index of a GPU (that of ``nvidia-smi``); CPU ranks and MIG instances count from 0."""
    visible_id: str
    """Entry of ``CUDA_VISIBLE_DEVICES``; empty on the CPU."""
    name: str
    memory_bytes: int
    """Memory of the GPU, that of the host if the GPU has none of its own; on the CPU an equal share of the host's."""
    uuid: str = ""
    """UUID of a GPU; empty if NVML does not report it, and on the CPU."""

    @property
    def nvml_id(self) -> str:
        """Identifier for NVML: the UUID of a MIG instance, else the index."""
        return self.visible_id if is_part(self.visible_id) else str(self.index)

    @property
    def certain_id(self) -> str:
        """Entry of ``CUDA_VISIBLE_DEVICES`` that stays valid if a GPU does not answer and indices shift."""
        return self.uuid or self.visible_id


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices that launches may run on."""

    kind: str
    """``cuda`` or ``cpu``."""
    devices: tuple[Device, ...]
    host_memory_bytes: int
    notices: tuple[str, ...] = ()
    """Lines for the user about the detection: a GPU that is left out, an entry that CUDA ignores."""
    left_out: int = 0
    """GPUs that do not answer."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Index of each device."""
        return tuple(device.index for device in self.devices)

    @property
    def per_launch(self) -> int:
        """Most devices of one launch: all, 1 if they are MIG instances.

        A process sees one instance only, however many it may use (NVIDIA MIG user guide, "Running CUDA applications").
        """
        return 1 if any(is_part(device.visible_id) for device in self.devices) else len(self.devices)


def host_memory_bytes() -> int:
    """Return the memory of this machine, or the limit of its container if that is lower."""
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
    if ranks > MOST_CPU_RANKS:
        raise UsageError(
            f"--cpu-ranks is {ranks}; this machine has {things_in_words(os.cpu_count() or 1, 'core')}. "
            f"Give at most {MOST_CPU_RANKS}."
        )
    memory, name = host_memory_bytes(), _cpu_name()
    return Devices(
        kind="cpu",
        devices=tuple(Device(index=i, visible_id="", name=name, memory_bytes=memory // ranks) for i in range(ranks)),
        host_memory_bytes=memory,
    )


def detect_devices(
    *, environ: Mapping[str, str] | None = None, nvml: Nvml | None = None, cpu_ranks: int | None = None
) -> Devices:
    """Return the GPUs that this process may use, CPU ranks if there is none.

    ``CUDA_VISIBLE_DEVICES`` is honoured. Its numbers are taken in the order of the PCI bus, which is also the order
    given to launches (``CUDA_DEVICE_ORDER=PCI_BUS_ID``); CUDA's own default differs only between unlike GPUs. A GPU
    that does not answer is left out, and the others are then named by their UUIDs, which no missing GPU shifts.

    Args:
        environ: Environment to read, this process's for None.
        nvml: NVML to ask, the machine's for None.
        cpu_ranks: CPU ranks if there is no GPU; None for 2.

    Raises:
        DeviceError: If the NVIDIA driver is loaded but neither it nor any GPU that is named answers.
        UsageError: If ``cpu_ranks`` is less than 1, or torch is built for GPUs of other makers.
    """
    environ = os.environ if environ is None else environ
    cpu = cpu_devices(DEFAULT_CPU_RANKS if cpu_ranks is None else cpu_ranks)
    if environ.get(VARIABLE, "0").strip() in ("", "-1") or environ.get("DS_ACCELERATOR") == "cpu":
        return cpu
    refuse_other_builds(environ)
    try:
        nvml = Nvml() if nvml is None else nvml
        count = nvml.count()
    except NvmlError as error:
        return replace(cpu, notices=_without_nvml(error))
    if not count:
        nothing = "NVIDIA's driver answers but shows no GPU: launches run on the CPU."
        return replace(cpu, notices=(nothing, *other_devices()))
    visible = read_visible(environ.get(VARIABLE), [nvml.uuid(index) for index in range(count)])
    if not visible.gpus:
        return replace(cpu, notices=(*visible.notices, f"{VARIABLE} names no GPU: launches run on the CPU."))
    return _look_at(visible, nvml, host_memory=cpu.host_memory_bytes)


def _without_nvml(error: NvmlError) -> tuple[str, ...]:
    """Return the notices for a machine whose NVML does not answer, where launches run on the CPU.

    Raises:
        DeviceError: If there is an NVIDIA driver nevertheless.
    """
    loaded = _DRIVER.exists()
    if error.code == LIBRARY_NOT_FOUND and _CONTROL.exists():
        raise DeviceError(
            f"The NVIDIA driver is there but its library NVML (libnvidia-ml.so.1) is not ({error}). Give the container "
            f"NVIDIA_DRIVER_CAPABILITIES=utility beside compute (docker run --gpus all -e "
            f"NVIDIA_DRIVER_CAPABILITIES=compute,utility), {_ON_THE_CPU}"
        ) from error
    if error.code == LIBRARY_NOT_FOUND:
        absent = "The kernel has NVIDIA's driver, but no GPU is given to this container (docker run --gpus all)"
        return (*((f"{absent}: launches run on the CPU.",) if loaded else ()), *other_devices())
    if loaded or error.code not in (None, DRIVER_NOT_LOADED):
        raise DeviceError(
            f"The NVIDIA driver is loaded but does not answer ({error}). Repair it (try nvidia-smi), {_ON_THE_CPU}"
        ) from error
    quiet = f"NVML does not answer ({error}): launches run on the CPU."
    return (*((quiet,) if error.code is not None else ()), *other_devices())


def _look_at(visible: Visible, nvml: Nvml, *, host_memory: int) -> Devices:
    """Return the GPUs that answer; the others are left out with a notice.

    Raises:
        DeviceError: If none answers.
    """
    found: list[Device] = []
    lost: list[str] = []
    for place, gpu in enumerate(visible.gpus):
        try:
            facts = nvml.facts(gpu)
        except NvmlError as error:
            lost.append(f"GPU {gpu} is left out, it does not answer ({error}). nvidia-smi and dmesg may say why.")
        else:
            found.append(_device(gpu, facts, place=place, host_memory=host_memory))
    if not found:
        raise DeviceError(f"No GPU answers. {' '.join(lost)} Repair them, {_ON_THE_CPU}")
    if lost or visible.by_uuid:
        found = [replace(device, visible_id=device.certain_id) for device in found]
    notices = [*visible.notices, *lost]
    if len(found) > 1 and is_part(found[0].visible_id):
        notices.append("These are parts of GPUs (MIG), of which a CUDA process sees one: a launch takes one of them.")
    return Devices(
        kind="cuda",
        devices=tuple(found),
        host_memory_bytes=host_memory,
        notices=tuple(notices),
        left_out=len(lost),
    )


def _device(gpu: str, facts: GpuFacts, *, place: int, host_memory: int) -> Device:
    if is_part(gpu):
        index = place
    elif facts.index is None:
        index = int(gpu) if gpu.isdigit() else place
    else:
        index = facts.index
    return Device(
        index=index,
        visible_id=gpu,
        name=facts.name,
        memory_bytes=host_memory if facts.memory_bytes is None else facts.memory_bytes,
        uuid=facts.uuid or ("" if gpu.isdigit() else gpu),
    )
