"""Check GPUs, memory, disks and compiler of this machine, and a folder for NVMe offload."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from optuna_dsat.doctor.finding import Finding, Status, finding_of
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.devices import Device, Devices, cpu_devices, detect_devices
from optuna_dsat.launch.machine.host import available_memory_bytes
from optuna_dsat.launch.machine.nvme import SIZE_BYTES, measure
from optuna_dsat.launch.machine.nvml import DeviceError, Nvml, NvmlError
from optuna_dsat.launch.machine.owners import foreign_holders, users_in_words
from optuna_dsat.runtime.agent.operators import extensions_dir
from optuna_dsat.runtime.files import file_system
from optuna_dsat.runtime.isolation.mounts import why_no_overlay
from optuna_dsat.runtime.measure.memory import host_memory_bytes
from optuna_dsat.words import bytes_in_words, things_in_words

_GIB = 2**30
_LEAST_SHM_BYTES = 2**30
"""Minimum shared memory for NCCL, DeepSpeed's CPU operator and data loader workers; containers often have 64 MiB."""
_LEAST_DISK_BYTES = 2 * _GIB


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The devices that launches would use."""

    devices: Devices | None
    """None if the driver does not respond."""
    nvml: Nvml | None
    """None if NVML is unavailable."""
    hidden: int
    """GPUs of the machine that are hidden from this process."""
    error: str = ""
    """Reason why the driver does not respond; empty if it responds."""
    refused: str = ""
    """Reason why a search would be rejected before detecting GPUs; empty if it would not."""

    @property
    def count(self) -> int:
        """Number of GPUs that launches would use."""
        return len(self.devices.devices) if self.devices is not None and self.devices.kind == "cuda" else 0


def find_gpus(*, environ: Mapping[str, str] | None = None, nvml: Nvml | None = None) -> Gpus:
    """Return the devices that launches would use, detected as a search does, in this environment by default."""
    total = 0
    with contextlib.suppress(NvmlError):
        nvml = Nvml() if nvml is None else nvml
        total = nvml.count()
    try:
        devices = detect_devices(environ=environ, nvml=nvml)
    except DeviceError as error:
        return Gpus(devices=None, nvml=nvml, hidden=0, error=str(error))
    except UsageError as error:
        return Gpus(devices=cpu_devices(1), nvml=nvml, hidden=0, refused=str(error))
    used = len(devices.devices) if devices.kind == "cuda" else 0
    return Gpus(devices=devices, nvml=nvml, hidden=max(0, total - used - devices.left_out))


def device_findings(gpus: Gpus) -> Iterator[Finding]:
    """Yield the findings on GPUs and driver."""
    if gpus.devices is None:
        text, _, remedy = gpus.error.partition(" Repair ")
        remedy = f"Repair {remedy}" if remedy else ""
        yield finding_of("devices", "driver", text, remedy, status=Status.FATAL)
        return
    if gpus.nvml is not None and gpus.count:
        yield _driver(gpus.nvml)
        for device in gpus.devices.devices:
            yield _gpu(device, gpus.nvml)
    for number, notice in enumerate(gpus.devices.notices, start=1):
        yield finding_of("devices", f"notice {number}", notice, status=Status.PROBLEM)
    if gpus.refused:
        yield refused_accelerator(gpus.refused)
    if not gpus.count:
        yield _cpu(gpus.devices if gpus.devices.kind == "cpu" else cpu_devices(1), hidden=gpus.hidden > 0)
    if gpus.hidden:
        text = f"CUDA_VISIBLE_DEVICES or DS_ACCELERATOR hides {things_in_words(gpus.hidden, 'GPU')} of this machine."
        yield finding_of("devices", "hidden GPUs", text, data={"count": gpus.hidden}, status=Status.NOTE)


def refused_accelerator(message: str) -> Finding:
    """Return the finding on a device or a torch that no search uses, by the message of its refusal."""
    text, _, remedy = message.partition(". ")
    return finding_of("devices", "accelerator", f"{text}.", remedy, status=Status.PROBLEM)


def _driver(nvml: Nvml) -> Finding:
    try:
        version = nvml.driver_version()
    except NvmlError as error:
        return finding_of("devices", "driver", f"The driver's version: {error}", status=Status.NOTE)
    return finding_of("devices", "driver", f"Driver {version}", data={"version": version})


def _cpu(devices: Devices, *, hidden: bool) -> Finding:
    device = devices.devices[0]
    text = (
        f"No GPU: launches run on the CPU ({device.name}, {things_in_words(os.cpu_count() or 1, 'core')}). "
        "Rankings on the CPU do not carry over to GPUs."
    )
    remedy = "" if hidden else "With an NVIDIA GPU in this machine: install its driver, then try nvidia-smi."
    return finding_of(
        "devices", "cpu", text, remedy, data={"name": device.name, "cores": os.cpu_count()}, status=Status.NOTE
    )


def _gpu(device: Device, nvml: Nvml) -> Finding:
    data: dict[str, object] = {"index": device.index, "model": device.name, "memory_bytes": device.memory_bytes}
    text = f"GPU {device.index}: {device.name}, {bytes_in_words(device.memory_bytes)}"
    name = f"gpu {device.index}"
    try:
        use = nvml.use(device.nvml_id)
    except NvmlError as error:
        text = f"{text}; it does not answer ({error})"
        remedy = "Launches leave it out; nvidia-smi and dmesg may say why."
        return finding_of("devices", name, text, remedy, data=data)
    data |= {"used_bytes": use.used_bytes, "processes": None if use.processes is None else sorted(use.processes)}
    holders = foreign_holders(device, use, nvml)
    if holders:
        text = f"{text}; in use by {users_in_words(holders)}"
        remedy = "Launches leave it alone while it is in use: end its processes, or continue without it."
        return finding_of("devices", name, text, remedy, data=data)
    return finding_of("devices", name, f"{text}, free", data=data)


def host_findings(*, output_dir: Path, environ: Mapping[str, str], shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Yield the findings on memory, shared memory (mounted at ``shm``), disks and compiler."""
    yield _memory()
    if shm.is_dir():
        yield _shared_memory(shm)
    yield _disk(output_dir)
    yield _isolation(output_dir)
    yield _compiler(environ)


def _memory() -> Finding:
    total, available = host_memory_bytes(), available_memory_bytes()
    data = {"total_bytes": total, "available_bytes": min(total, available)}
    text = f"{bytes_in_words(total)} of host memory, {bytes_in_words(min(total, available))} available"
    return finding_of("host", "memory", text, data=data)


def _shared_memory(shm: Path) -> Finding:
    usage = shutil.disk_usage(shm)
    text = f"{bytes_in_words(usage.total)} of shared memory ({shm}), {bytes_in_words(usage.free)} free"
    scarce = usage.free < _LEAST_SHM_BYTES
    remedy = (
        "Data loaders' workers and ranks may die with a bus error: give a container more with --shm-size 8g."
        if scarce
        else ""
    )
    return finding_of(
        "host", "shared memory", text, remedy, data={"total_bytes": usage.total, "free_bytes": usage.free}
    )


def _nearest(folder: Path) -> Path:
    """Return a folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _disk(output_dir: Path) -> Finding:
    parent = _nearest(output_dir.absolute())
    data: dict[str, object] = {"path": str(output_dir)}
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        text = f"The output directory {output_dir} cannot be written to ({parent})."
        remedy = "Give another with --output-dir."
        return finding_of("host", "disk", text, remedy, data=data, status=Status.FATAL)
    free = shutil.disk_usage(parent).free
    scarce = free < _LEAST_DISK_BYTES
    text = f"{bytes_in_words(free)} free for {output_dir}"
    remedy = "Launches write logs, and DeepSpeed compiles: make room, or give another --output-dir." if scarce else ""
    return finding_of("host", "disk", text, remedy, data=data | {"free_bytes": free})


def _isolation(output_dir: Path) -> Finding:
    folder = output_dir if output_dir.is_dir() else Path(tempfile.gettempdir())
    why = why_no_overlay(folder)
    text = (
        f"Overlays cannot be mounted ({why}): of what trials write, only Python's writers are redirected."
        if why
        else "Trials write to overlays: the user's files stay as they are."
    )
    remedy = (
        "Allow unprivileged user namespaces (user.max_user_namespaces), or give a container CAP_SYS_ADMIN."
        if why
        else ""
    )
    return finding_of("host", "isolation", text, remedy, data={"overlays": not why, "reason": why})


def compiler(environ: Mapping[str, str]) -> tuple[str | None, bool]:
    """Return the C++ compiler that DeepSpeed would build operators with (None if none), and whether ninja works."""
    path = environ.get("PATH")
    wanted = environ.get("CXX", "c++")
    result = next((item for name in (wanted, "g++", "clang++") if (item := shutil.which(name, path=path))), None)
    ninja = shutil.which("ninja", path=path)
    works = ninja is not None and subprocess.run([ninja, "--version"], capture_output=True, check=False).returncode == 0
    return result, works


def _compiler(environ: Mapping[str, str]) -> Finding:
    result, ninja = compiler(environ)
    folder = extensions_dir(environ)
    data = {"compiler": result, "ninja": ninja, "folder": str(folder)}
    missing = [name for name, there in (("a C++ compiler", result), ("ninja", ninja)) if not there]
    if missing:
        text = f"Without {' and '.join(missing)} DeepSpeed's operators cannot be built on first use."
        remedy = 'apt install g++ and pip install ninja; or use optimizers of torch ("torch_adam": true).'
        return finding_of("host", "compiler", text, remedy, data=data)
    if not os.access(_nearest(folder), os.W_OK):
        text = f"DeepSpeed's operators are compiled into {folder}, which cannot be written to."
        remedy = "Set TORCH_EXTENSIONS_DIR to a folder that can be."
        return finding_of("host", "compiler", text, remedy, data=data)
    return finding_of(
        "host", "compiler", f"DeepSpeed's operators can be built: {result}, ninja; into {folder}", data=data
    )


_SLOW_BYTES_PER_S = 10**9
"""Speed below which a drive is reported as slow: NVMe drives read 2 to 7 GB/s, SATA SSDs 0.5, hard disks 0.2."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "beegfs"})


def drive_finding(folder: Path, *, size_bytes: int = SIZE_BYTES) -> Finding:
    """Return the finding on a folder for NVMe offload, including its measured speed."""
    data: dict[str, object] = {"path": str(folder)}
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} is not a folder that can be written to."
        remedy = "Give --nvme-path a folder on the drive that optimizer states and parameters shall be offloaded to."
        return finding_of("offload", "nvme drive", text, remedy, data=data)
    kind = file_system(folder)
    try:
        speed = measure(folder, size_bytes=size_bytes)
    except OSError as error:
        text = f"The speed of {folder} cannot be measured: {error.strerror}."
        remedy = "Make room there, or give another folder."
        return finding_of("offload", "nvme drive", text, remedy, data=data)
    data |= {"file_system": kind, **vars(speed)}
    text = (
        f"{folder} ({kind or 'file system not known'}) reads {speed.read_bytes_per_s / 1e9:.2f} GB/s and writes "
        f"{speed.write_bytes_per_s / 1e9:.2f} GB/s"
    )
    if not speed.direct:
        text += "; the page cache could not be bypassed, so the drive itself may be slower"
    remedy = ""
    if kind in _IN_MEMORY:
        remedy = "This folder lies in memory, not on a drive: offload to the CPU instead."
    elif kind in _REMOTE:
        remedy = "This folder lies on another machine: NVMe offload wants a drive of this one."
    elif speed.read_bytes_per_s < _SLOW_BYTES_PER_S:
        remedy = "Slower than an NVMe drive (2 to 7 GB/s): every step waits for it. Give a folder on a faster one."
    status = Status.PROBLEM if remedy else Status.FINE
    return finding_of("offload", "nvme drive", f"{text}.", remedy, data=data, status=status)
