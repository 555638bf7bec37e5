"""Memory peaks and limits of a rank, and the limits of its control groups.

On CUDA, both come from the caching allocator. On a CPU the limit is ``RLIMIT_DATA``, which counts private writable
memory, touched or not (``VmData`` of ``/proc/self/status``); the peak is in the same unit, as growth since the
limit was set. The kernel keeps no high-water mark of ``VmData``, so the peak is the larger of two lower bounds:
the growth of ``VmData`` sampled at the end of every phase (includes buckets that are allocated but never
touched), and the growth of the resident set's high-water mark (includes memory that was allocated and freed
within a phase).
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import logging
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.imports import patch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Folder of the memory groups below the root (control groups version 2, then 1) -> files with a group's limit and use,
and the field of ``memory.stat`` with read files, which the kernel drops first.
"""


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of this process, in bytes."""

    data: int
    """Private writable memory, touched or not, which ``RLIMIT_DATA`` limits; 0 if unknown."""
    resident: int
    peak_resident: int


@dataclass(frozen=True)
class MemoryPeaks:
    """Peaks in bytes, as ``StepMeasured`` defines them."""

    allocated: int
    reserved: int
    resident: int


def read_process_memory() -> ProcessMemory:
    """Read ``/proc/self/status``."""
    kib = {"VmData": 0, "VmRSS": 0, "VmHWM": 0}
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in kib:
            kib[name] = int(value.split()[0])
    return ProcessMemory(data=kib["VmData"] * 1024, resident=kib["VmRSS"] * 1024, peak_resident=kib["VmHWM"] * 1024)


def _reset_peak_resident() -> None:
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5", encoding="ascii")  # proc(5)


class CpuMemory:
    """Peaks of a rank on CPU, as growth since construction (see the module's docstring)."""

    def __init__(self, read: Callable[[], ProcessMemory] = read_process_memory) -> None:
        self._read = read
        _reset_peak_resident()
        self.baseline = read()
        self._peak_data = self.baseline.data

    def engine_ready(self) -> None:
        """Take a sample; like the limit, the peak is relative to the baseline."""
        self.sample()

    def sample(self) -> None:
        """Update the peak with the current size."""
        self._peak_data = max(self._peak_data, self._read().data)

    def restart(self) -> None:
        """Give free memory back to the system, and begin anew with the peaks, which remain relative to the baseline."""
        with contextlib.suppress(OSError, AttributeError):  # a C library without it
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        _reset_peak_resident()
        self._peak_data = self._read().data

    def peaks(self) -> MemoryPeaks:
        """Return the peaks so far."""
        now = self._read()
        self._peak_data = max(self._peak_data, now.data)
        grown = max(self._peak_data - self.baseline.data, now.peak_resident - self.baseline.resident, 0)
        return MemoryPeaks(allocated=grown, reserved=now.peak_resident, resident=now.peak_resident)


class CudaMemory:
    """Peaks of the caching allocator since the engine was built."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def engine_ready(self) -> None:
        """Reset the peaks, which include building the engine."""
        self._accelerator.reset_peak_memory_stats()

    def sample(self) -> None:
        """Do nothing: the allocator tracks the peaks."""

    def restart(self) -> None:
        """Give free memory back to the device, whose blocks cannot serve larger ones, and begin anew."""
        self._accelerator.empty_cache()
        self._accelerator.reset_peak_memory_stats()

    def peaks(self) -> MemoryPeaks:
        """Return the peaks so far."""
        return MemoryPeaks(
            allocated=int(self._accelerator.max_memory_allocated()),
            reserved=int(self._accelerator.max_memory_reserved()),
            resident=read_process_memory().peak_resident,
        )


def limit_process_memory(budget_bytes: int, baseline: ProcessMemory) -> None:
    """Limit this process to ``budget_bytes`` beyond the baseline; torch raises its allocation error above it.

    Called after torch and DeepSpeed are imported. All later allocations count; Gloo's threads and DeepSpeed's late
    imports use about 60 MiB (DeepSpeed 0.19.8).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = baseline.data + budget_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def process_limit_lifted() -> Iterator[None]:
    """Return a context in which this process and its children allocate without the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def unlink_shared_buffers(maps: Path = Path("/proc/self/maps")) -> None:
    """Unlink the shared-memory buffers that DeepSpeed's CPU operator maps and never unlinks.

    They stay mapped until the last rank of this host ends; otherwise each rank leaves 66 MiB in ``/dev/shm``.
    Call it after all ranks have mapped them, i.e. after the first step.
    """
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/deepspeed_" in line}:
        with contextlib.suppress(OSError):  # another rank has unlinked it
            Path(path).unlink()


def limit_cuda_memory(torch: Any, budget_bytes: int, local_rank: int) -> None:
    """Limit the caching allocator of this rank's device, ``local_rank`` by torchrun's convention, to ``budget_bytes``.

    Does not initialize CUDA: torch applies the limit when the script first uses CUDA. The CUDA context and
    allocations by libraries (NCCL buffers) are not included.
    """

    def apply() -> None:
        device = local_rank if local_rank < torch.cuda.device_count() else torch.cuda.current_device()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)

    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        return  # built without CUDA
    torch.cuda._lazy_call(apply)


def watch_caught_errors(torch: Any, note: Callable[[BaseException], None]) -> None:
    """Call ``note`` at each ``torch.OutOfMemoryError``, and with an error whose handler frees memory or reports."""

    @patch(getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError), "__init__")  # torch before 2.5
    def init(original: Any, self: BaseException, *args: object) -> None:
        original(self, *args)
        note(self)

    handlers = ((torch.cuda, "empty_cache"), (gc, "collect"), (builtins, "print"), (logging.Logger, "handle"))
    for owner, name in handlers:

        @patch(owner, name)
        def handle(original: Any, *args: Any, **kwargs: Any) -> Any:
            if (handled := sys.exc_info()[1]) is not None:
                note(handled)
            return original(*args, **kwargs)


def support_uuid_visible_devices(accelerator: Any) -> None:
    """Make ``accelerator.available_memory`` work if ``CUDA_VISIBLE_DEVICES`` names GPUs by UUID.

    With nvidia-ml-py installed, DeepSpeed's accelerator (0.19.8) parses that variable as device numbers for NVML and
    raises a ValueError in ``deepspeed.initialize`` at ZeRO 1 and 2 if it contains UUIDs. MIG instances have no numbers.
    On that error, CUDA is queried instead.
    """
    if not hasattr(accelerator, "available_memory"):
        return

    @patch(accelerator, "available_memory")
    def available_memory(original: Any, device_index: int | None = None) -> int:
        try:
            return int(original(device_index))
        except ValueError:
            return int(sys.modules["torch"].cuda.mem_get_info(device_index)[0])


def host_memory_bytes(*, membership: Path = _MEMBERSHIP, root: Path = _CGROUPS) -> int:
    """Return the physical memory of the host in bytes, or the lowest limit of its control groups if that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in memory_limits(membership=membership, root=root))])


def cpu_name() -> str:
    """Return the model of the processor; its architecture if the kernel names no model."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()  # platform.processor starts a process


def usable_cores(*, membership: Path = _MEMBERSHIP, root: Path = _CGROUPS) -> int:
    """Return the cores that this process may run on, or fewer by the lowest CPU quota of its control groups."""
    cores = float(len(os.sched_getaffinity(0)))
    for name, folder in control_groups("cpu", membership, root):
        with contextlib.suppress(OSError, ValueError):  # no such group here, or its quota is "max"
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if name else ("cpu.max",)
            quota, period = map(int, " ".join((folder / file).read_text(encoding="ascii") for file in files).split())
            cores = min(cores, quota / period) if quota > 0 else cores
    return max(1, int(cores))


def numa_nodes(*, folder: Path = Path("/sys/devices/system/node")) -> int:
    """Return the NUMA nodes of this host that have cores, at least 1."""
    return max(1, sum(bool(cores.read_text(encoding="ascii").strip()) for cores in folder.glob("node*/cpulist")))


def memory_limits(*, membership: Path = _MEMBERSHIP, root: Path = _CGROUPS) -> Iterator[tuple[int, int]]:
    """Yield each memory limit of this process's control groups and their parents, and the bytes left below it."""
    for name, folder in control_groups("memory", membership, root):
        yield from _limit_of(folder, *_CGROUP_FILES[name])


def control_groups(
    controller: str, membership: Path = _MEMBERSHIP, root: Path = _CGROUPS
) -> Iterator[tuple[str, Path]]:
    """Yield the folders of this process's control groups and their parents, each after its controller of version 1."""
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    groups = {"": "", controller: ""}  # a container sees its own group as the root
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        groups |= dict.fromkeys(groups.keys() & {*controllers.split(",")}, path)
    for name, path in groups.items():
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts) + 1):
            yield name, (root / name).joinpath(*parts[:count])


def _limit_of(folder: Path, limit_name: str, used_name: str, cache_name: str) -> Iterator[tuple[int, int]]:
    """Yield limit and bytes left of a control group, read files counted as free; nothing if it has no limit."""
    with contextlib.suppress(OSError, ValueError):  # no such group here, or its limit is "max"
        limit = int((folder / limit_name).read_text(encoding="ascii"))
        used = cache = 0
        with contextlib.suppress(OSError, ValueError):
            used = int((folder / used_name).read_text(encoding="ascii"))
            statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            cache = next((int(line.split()[1]) for line in statistics if line.startswith(f"{cache_name} ")), 0)
        yield limit, limit - max(0, used - cache)
