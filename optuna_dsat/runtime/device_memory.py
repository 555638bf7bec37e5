"""Memory of a rank: what it peaks at and what it may take.

On CUDA both are the caching allocator's. On a CPU the limit is ``RLIMIT_DATA``, which counts private writable
memory, touched or not (``VmData`` of ``/proc/self/status``); the peak is given in that unit, as growth since
the limit was set. The kernel keeps no high-water mark of it, so the peak is the larger of two lower bounds:
the growth of ``VmData`` sampled at the end of every phase (sees buckets that are allocated but never
touched), and the growth of the resident set's own high-water mark (sees what was allocated and freed within a
phase).
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "CpuMemory",
    "CudaMemory",
    "MemoryPeaks",
    "MemoryProbe",
    "ProcessMemory",
    "host_memory_bytes",
    "limit_cuda_memory",
    "limit_process_memory",
    "process_limit_lifted",
    "read_process_memory",
    "support_uuid_visible_devices",
    "unlink_shared_buffers",
]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """Memory of this process, in bytes."""

    data: int
    """Private writable memory, touched or not: what ``RLIMIT_DATA`` limits. 0 where it is not told."""
    resident: int
    peak_resident: int


@dataclass(frozen=True, kw_only=True)
class MemoryPeaks:
    """Peaks in bytes, in the units of ``StepMeasured``."""

    allocated: int
    reserved: int
    resident: int


class MemoryProbe(Protocol):
    """Follows the memory of a rank."""

    def engine_ready(self) -> None:
        """The engine is built; what follows are training steps."""
        ...

    def sample(self) -> None:
        """A phase of a step has ended."""
        ...

    def peaks(self) -> MemoryPeaks:
        """Return the peaks so far."""
        ...


def read_process_memory() -> ProcessMemory:
    """Read ``/proc/self/status``; where there is none, the resident set from ``getrusage``."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return ProcessMemory(data=0, resident=peak, peak_resident=peak)
    kib = {"VmData": 0, "VmRSS": 0, "VmHWM": 0}
    for line in lines:
        name, _, value = line.partition(":")
        if name in kib:
            kib[name] = int(value.split()[0])
    return ProcessMemory(data=kib["VmData"] * 1024, resident=kib["VmRSS"] * 1024, peak_resident=kib["VmHWM"] * 1024)


class CpuMemory:
    """Peaks of a rank on CPU, as growth since this object was made (see the module's docstring).

    Args:
        read: Reads the memory of this process.
    """

    def __init__(self, read: Callable[[], ProcessMemory] = read_process_memory) -> None:
        self._read = read
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text("5", encoding="ascii")  # proc(5): the peak resident set starts anew
        self.baseline = read()
        self._peak_data = self.baseline.data

    def engine_ready(self) -> None:
        """Take a sample; the peak counts from the baseline on, as the limit does."""
        self.sample()

    def sample(self) -> None:
        """Note the present size."""
        self._peak_data = max(self._peak_data, self._read().data)

    def peaks(self) -> MemoryPeaks:
        """Return the peaks so far."""
        now = self._read()
        self._peak_data = max(self._peak_data, now.data)
        grown = max(self._peak_data - self.baseline.data, now.peak_resident - self.baseline.resident, 0)
        return MemoryPeaks(allocated=grown, reserved=now.peak_resident, resident=now.peak_resident)


class CudaMemory:
    """Peaks of the caching allocator since the engine was built.

    Args:
        accelerator: DeepSpeed's accelerator of this rank.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def engine_ready(self) -> None:
        """Forget the peaks of building the engine."""
        self._accelerator.reset_peak_memory_stats()

    def sample(self) -> None:
        """Nothing to do: the allocator keeps the peaks itself."""

    def peaks(self) -> MemoryPeaks:
        """Return the peaks so far."""
        return MemoryPeaks(
            allocated=int(self._accelerator.max_memory_allocated()),
            reserved=int(self._accelerator.max_memory_reserved()),
            resident=read_process_memory().peak_resident,
        )


def limit_process_memory(budget_bytes: int, baseline: ProcessMemory) -> None:
    """Let this process allocate ``budget_bytes`` beyond the baseline; then torch raises its allocation error.

    Called once the heavy imports are done, so that they are not charged: what the script itself allocates
    from then on is, the model and data it holds in memory included. Threads of gloo and DeepSpeed's last
    imports take about 60 MiB of it (measured with DeepSpeed 0.19.8).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = baseline.data + budget_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def process_limit_lifted() -> Iterator[None]:
    """Within this context the process, and what it starts, may allocate without the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def unlink_shared_buffers(maps: Path = Path("/proc/self/maps")) -> None:
    """Remove the names of the shared-memory buffers that DeepSpeed's CPU operator maps and never removes.

    They stay mapped until the last rank of this host ends; without this each rank leaves 66 MiB in ``/dev/shm``.
    Call it once all ranks have mapped them: after the first step.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return  # no such file outside Linux
    for path in {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/deepspeed_" in line}:
        with contextlib.suppress(OSError):  # another rank was first
            Path(path).unlink()


def limit_cuda_memory(torch: Any, budget_bytes: int, local_rank: int) -> None:
    """Let the caching allocator of this rank's device take ``budget_bytes``, from CUDA's initialisation on.

    Does not initialise CUDA itself: torch runs the call once the script's first use of CUDA does. The CUDA
    context and what libraries allocate for themselves (NCCL buffers) come on top.

    Args:
        torch: The torch module.
        budget_bytes: What the rank may allocate.
        local_rank: The rank's number on this host, torchrun's convention for its device index.
    """

    def apply() -> None:
        device = local_rank if local_rank < torch.cuda.device_count() else torch.cuda.current_device()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)

    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        return  # built without CUDA
    torch.cuda._lazy_call(apply)


def support_uuid_visible_devices(accelerator: Any) -> None:
    """Have DeepSpeed find the free memory of GPUs that ``CUDA_VISIBLE_DEVICES`` names by UUID.

    With nvidia-ml-py installed, its accelerator (0.19.8) reads that variable as numbers for NVML, and ends every
    ``deepspeed.initialize`` at ZeRO 1 and 2 with a ValueError otherwise. Parts of a GPU (MIG) have no numbers. CUDA
    itself answers then.

    Args:
        accelerator: DeepSpeed's accelerator of this rank; another version's may not tell its free memory.
    """
    original = getattr(accelerator, "available_memory", None)
    if original is None:
        return

    @functools.wraps(original)
    def available_memory(device_index: int | None = None) -> int:
        try:
            return int(original(device_index))
        except ValueError:
            return int(sys.modules["torch"].cuda.mem_get_info(device_index)[0])

    accelerator.available_memory = available_memory


def host_memory_bytes() -> int:
    """Return the physical memory of the host, or of the container where that is less, in bytes."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such cgroup version, or "max"
            return min(physical, int(path.read_text(encoding="ascii")))
    return physical
