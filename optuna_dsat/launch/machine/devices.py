"""The devices of this machine: GPUs reported by NVML, or ranks on the CPU; the software and clocks they run with.

Never imports torch and never creates a CUDA context: the tuner must not use memory of the GPUs it measures.
The NVML part has not been run on a machine with a GPU yet.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.nvml import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, DeviceError, GpuFacts, Nvml, NvmlError
from optuna_dsat.runtime.measure.memory import cpu_name, host_memory_bytes
from optuna_dsat.script.interpreter import examined, script_versions
from optuna_dsat.words import things_in_words

# Devices other than NVIDIA GPUs are not supported; the user is informed before a search runs on the CPU instead.
#
# The platform torch was built for is read from its version (``2.9.0+rocm6.4``, ``2.9.0+xpu``: the wheels of
# pytorch.org), without importing it.

_BUILDS = {"rocm": "AMD GPUs (ROCm)", "xpu": "Intel GPUs (XPU)"}
"""Local version tag of torch -> platform it was built for."""

_NODES = {
    "kfd": "an AMD GPU's driver (/dev/kfd)",
    "nvhost-gpu": "the GPU of a Jetson (/dev/nvhost-gpu)",
    "nvgpu": "the GPU of a Jetson (/dev/nvgpu)",
}
"""Name of a device file -> the device it belongs to."""

_DEV = Path("/dev")
_SUPPORTED = "optuna-dsat tunes on NVIDIA GPUs that NVML knows, and on the CPU"


def refuse_other_devices(environ: Mapping[str, str]) -> None:
    """Raise for a setting of DeepSpeed for devices other than NVIDIA GPUs and the CPU.

    Raises:
        UsageError: With the supported devices, and how to tune on the CPU.
    """
    wanted = environ.get("DS_ACCELERATOR", "")
    if wanted not in ("", "cuda", "cpu"):
        raise UsageError(
            f"DS_ACCELERATOR is {wanted!r}: {_SUPPORTED}. Unset it, or tune on the CPU with --cpu-ranks 2."
        )


def refuse_build(torch_version: str) -> None:
    """Raise for a build of torch for devices other than NVIDIA GPUs and the CPU.

    Raises:
        UsageError: With the supported devices, and how to tune on the CPU.
    """
    tag = re.match(r"[a-z]*", torch_version.partition("+")[2])
    built_for = _BUILDS.get(tag.group() if tag else "")
    if built_for is not None:
        raise UsageError(
            f"torch {torch_version} is a build for {built_for}: {_SUPPORTED}. Tune on the CPU with --cpu-ranks 2, or "
            "install a build of torch for CUDA."
        )


def other_devices() -> tuple[str, ...]:
    """Return a line for the user about each unsupported GPU of this machine."""
    return tuple(
        f"This machine has {what}, which is not used: {_SUPPORTED}."
        for name, what in _NODES.items()
        if (_DEV / name).exists()
    )


# Parser of ``CUDA_VISIBLE_DEVICES`` that follows CUDA's rules, including the entries that CUDA ignores.
#
# By the CUDA programming guide (environment variables) entries are indices or UUIDs, which may be shortened to a
# unique prefix, and parsing ends at the first invalid entry. Other rules follow ``torch/cuda/__init__.py`` of
# torch 2.13 (``_parse_visible_devices``, ``_transform_uuid_to_ordinals``): the first entry decides whether indices,
# ``GPU-`` or ``MIG-`` entries are read and an entry of another kind ends the list; a number counts up to its last
# digit (``1gpu2`` is 1). CUDA sees no GPU if one is repeated; here it counts once, since every launch gets a separate
# value of the variable.

VARIABLE = "CUDA_VISIBLE_DEVICES"
_NUMBER = re.compile(r"\+?(\d+)")
_GPU, _PART = "GPU-", "MIG-"


@dataclass(frozen=True, kw_only=True)
class Visible:
    """The GPUs that the variable makes visible."""

    gpus: tuple[str, ...]
    """Index of each GPU as text; the UUID of a MIG instance, or of a GPU that does not report its UUID."""
    by_uuid: bool = False
    """Whether the variable names GPUs by UUIDs."""
    notices: tuple[str, ...] = ()
    """Lines for the user on ignored entries."""


def is_part(gpu: str) -> bool:
    """Return whether this is the UUID of a MIG instance."""
    return gpu.startswith(_PART)


def read_visible(text: str | None, uuids: Sequence[str]) -> Visible:
    """Return the GPUs that a value of the variable lists, in its order; all for None.

    ``uuids`` has the UUID of each GPU of the machine by index; empty if not available.
    """
    if text is None:
        return Visible(gpus=tuple(map(str, range(len(uuids)))))
    entries = [entry.strip() for entry in text.split(",")]
    result: list[str] = []
    twice: list[str] = []
    ended: str | None = None
    for place, entry in enumerate(entries):
        gpu, why = _resolve(entry, entries[0], uuids)
        if gpu is None:
            if entry not in ("-1", "") or place + 1 < len(entries):
                rest = ",".join(entries[place:])
                ended = f"{VARIABLE} is {text!r}: {why}, so CUDA ignores {rest!r}."
            break
        (twice if gpu in result else result).append(gpu)
    notices = [] if ended is None else [ended]
    if twice:
        names = ", ".join(dict.fromkeys(twice))
        notices.append(
            f"{VARIABLE} is {text!r}: GPU {names} counts once; CUDA itself sees no GPU where one is repeated."
        )
    return Visible(gpus=tuple(result), by_uuid=entries[0].startswith(_GPU), notices=tuple(notices))


def _resolve(entry: str, first: str, uuids: Sequence[str]) -> tuple[str | None, str]:
    """Return the GPU of an entry; None and the reason if it is invalid or differs in kind from the first entry."""
    number = _NUMBER.match(entry)
    kinds = [next((kind for kind in (_GPU, _PART) if name.startswith(kind)), "") for name in (entry, first)]
    if kinds[0] != kinds[1]:
        return None, f"{entry!r} is of another kind than {first!r}, and indices, GPU- and MIG- UUIDs cannot be mixed"
    if kinds[0] == _PART:
        return entry, ""
    if kinds[0] == _GPU:
        return _by_uuid(entry, uuids)
    if number is None:
        return None, f"{entry!r} is no device"
    index = int(number.group(1))
    if index >= len(uuids):
        return None, f"{entry!r} is not one of this machine's {things_in_words(len(uuids), 'GPU')}"
    return str(index), ""


def _by_uuid(entry: str, uuids: Sequence[str]) -> tuple[str | None, str]:
    matching = [index for index, uuid in enumerate(uuids) if uuid and uuid.startswith(entry)]
    if not matching and not all(uuids):
        return entry, ""  # may be a GPU that does not report its UUID
    if not matching:
        return None, f"{entry!r} is not one of this machine's GPUs"
    if len(matching) > 1:
        return None, f"{entry!r} may be GPU {' or '.join(map(str, matching))}"
    return str(matching[0]), ""


DEFAULT_CPU_RANKS = 2
"""Ranks of a launch on a machine without a GPU: the smallest number for which ZeRO partitions."""
MOST_CPU_RANKS = 1024
"""Upper limit, far above the number of cores of any machine."""

_DRIVER = Path("/proc/driver/nvidia/version")
"""Exists while NVIDIA's kernel driver is loaded, also in containers without a GPU."""

_CONTROL = Path("/dev/nvidiactl")
"""Exists if a process can use that driver."""

_ON_THE_CPU = f"or set {VARIABLE}= (empty) to tune on the CPU."


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, a MIG instance of a GPU, or the share of the CPU of a rank."""

    index: int
    """NVML's index of a GPU, as in ``nvidia-smi``; CPU ranks and MIG instances count from 0."""
    visible_id: str
    """Entry of ``CUDA_VISIBLE_DEVICES``; empty on the CPU."""
    name: str
    memory_bytes: int
    """Memory of the GPU, or of the host if the GPU shares it; on the CPU an equal share of the host's memory."""
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
    """Devices available to launches."""

    kind: str
    """``cuda`` or ``cpu``."""
    devices: tuple[Device, ...]
    host_memory_bytes: int
    notices: tuple[str, ...] = ()
    """Lines for the user about the detection: excluded GPUs, entries ignored by CUDA."""
    left_out: int = 0
    """Number of GPUs that do not respond."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Index of each device."""
        return tuple(device.index for device in self.devices)

    @property
    def per_launch(self) -> int:
        """Maximum number of devices of a launch: all, or 1 for MIG instances.

        A process sees a single instance, however many are visible (NVIDIA MIG user guide, "Running CUDA applications").
        """
        return 1 if any(is_part(device.visible_id) for device in self.devices) else len(self.devices)


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
    memory, name = host_memory_bytes(), cpu_name()
    return Devices(
        kind="cpu",
        devices=tuple(Device(index=i, visible_id="", name=name, memory_bytes=memory // ranks) for i in range(ranks)),
        host_memory_bytes=memory,
    )


def detect_devices(*, environ: Mapping[str, str] | None = None, nvml: Nvml | None = None) -> Devices:
    """Return the GPUs that this process may use, or 2 CPU ranks if it has none.

    ``CUDA_VISIBLE_DEVICES`` is honoured. Its numbers are taken in the order of the PCI bus, which is also the order
    given to launches (``CUDA_DEVICE_ORDER=PCI_BUS_ID``); CUDA's default differs only between unlike GPUs. GPUs that do
    not respond are excluded, and the others are then identified by UUID, because a missing GPU shifts the indices.

    Raises:
        DeviceError: If the NVIDIA driver is loaded but neither it nor any visible GPU responds.
        UsageError: If DeepSpeed is set to use GPUs of other vendors.
    """
    environ = os.environ if environ is None else environ
    cpu = cpu_devices(DEFAULT_CPU_RANKS)
    if environ.get(VARIABLE, "0").strip() in ("", "-1") or environ.get("DS_ACCELERATOR") == "cpu":
        return cpu
    refuse_other_devices(environ)
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
    """Return the notices for a machine without NVML, where launches run on the CPU."""
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
    """Return the GPUs that respond; exclude the others with a notice."""
    devices: list[Device] = []
    lost: list[str] = []
    for place, gpu in enumerate(visible.gpus):
        try:
            facts = nvml.facts(gpu)
        except NvmlError as error:
            lost.append(f"GPU {gpu} is left out, it does not answer ({error}). nvidia-smi and dmesg may say why.")
        else:
            devices.append(_device(gpu, facts, place=place, host_memory=host_memory))
    if not devices:
        raise DeviceError(f"No GPU answers. {' '.join(lost)} Repair them, {_ON_THE_CPU}")
    if lost or visible.by_uuid:
        devices = [replace(device, visible_id=device.certain_id) for device in devices]
    notices = [*visible.notices, *lost]
    if len(devices) > 1 and is_part(devices[0].visible_id):
        notices.append("These are parts of GPUs (MIG), of which a CUDA process sees one: a launch takes one of them.")
    return Devices(
        kind="cuda",
        devices=tuple(devices),
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


_GIT_S = 5.0
"""Time limit for git, in seconds; a cold network file system takes seconds."""
_CUDA_OF_TORCH = re.compile(r"^cuda\b[^=\n]*= *'([\d.]+)'", re.MULTILINE)
"""Line of ``torch/version.py``."""


def environment_of(folder: Path, python: str | None, *, on: str, devices: Devices | None) -> dict[str, str]:
    """Return the environment of a script in a folder: Python, torch, DeepSpeed, CUDA, driver, clocks, git commit.

    Unknown facts are left out, such as the driver of a cluster's nodes.
    """
    facts = {**script_versions(python, on=on), "commit": _commit(folder)}
    if on == "here":
        facts["cuda"] = _cuda_of_torch(python or sys.executable)
        facts |= _gpu_facts(devices)
    return {name: text for name, text in facts.items() if text}


def _commit(folder: Path) -> str:
    """Return the commit of a folder, with ``-dirty`` if tracked files differ from it; empty without git."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch"]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # git describe ignores it and writes the index
    try:
        ended = subprocess.run(
            [*command, "--untracked-files=no"], env=environ, capture_output=True, text=True, timeout=_GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    commit = re.search(r"^# branch\.oid ([0-9a-f]+)$", ended.stdout, re.MULTILINE)
    return "" if commit is None else commit[1] + "-dirty" * bool(re.search("^[^#]", ended.stdout, re.MULTILINE))


def _cuda_of_torch(python: str) -> str:
    """Return the CUDA version that an interpreter's torch was built with, without importing it; empty on the CPU."""
    for folder in examined(python).path:
        try:
            text = Path(folder, "torch", "version.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        match = _CUDA_OF_TORCH.search(text)
        return match[1] if match else ""
    return ""


def _gpu_facts(devices: Devices | None) -> dict[str, str]:
    """Return the driver, and the clocks and power limit of the first GPU; empty without NVML."""
    if devices is None or devices.kind != "cuda" or not devices.devices:
        return {}
    try:
        nvml = Nvml()
        return {"driver": nvml.driver_version(), "clocks": nvml.limits(devices.devices[0].nvml_id)}
    except NvmlError:
        return {}
