"""Who may use which device: launches take slots (GPUs or CPU ranks), given back once they are measurably free."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.devices import Device, DeviceError, Devices, Nvml, NvmlError
from optuna_dsat.launch.processes import ProcessKey
from optuna_dsat.launch.protocol import SlotsBusyError

__all__ = ["SlotLease", "SlotPool"]

_TOLERANCE_BYTES = 64 * 2**20
"""Used memory may stay this much above what it was: drivers keep a few MiB (a CUDA context takes 200 or more)."""

_FOREIGN_SHARE = 0.2
"""A GPU of which this share is in use without a launch of ours is somebody else's, even if NVML lists no compute
process (as in containers). A desktop takes less."""

_SURVEY_S = 1.0
"""How long an answer about other processes' use of the GPUs is believed."""


@dataclass(frozen=True, kw_only=True)
class SlotLease:
    """Devices taken for one launch."""

    devices: tuple[Device, ...]
    baseline_bytes: Mapping[int, int]
    """Per GPU index: memory in use before the launch that no living process of somebody else accounts for."""
    locks: tuple[int, ...] = ()
    """Open file descriptors that hold the GPUs' locks against other tuners on this machine."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Index of each device."""
        return tuple(device.index for device in self.devices)


class SlotPool:
    """The devices that launches may take.

    GPUs that other processes use are left alone, for as long as they use them; a lock file per GPU in the system's
    folder for temporary files keeps two tuners from taking the same one at the same moment.

    Args:
        devices: What there is.
        max_slots: Use no more than this many of them at a time; None for all.
        nvml: NVML to ask about GPUs; None for the machine's.
        lock_dir: Folder of the lock files; None for the system's folder for temporary files.
        clock: Monotonic time in seconds.

    Raises:
        UsageError: If ``max_slots`` is less than 1.
        DeviceError: If there are GPUs but NVML does not answer.
    """

    def __init__(
        self,
        devices: Devices,
        *,
        max_slots: int | None = None,
        nvml: Nvml | None = None,
        lock_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_slots is not None and max_slots < 1:
            raise UsageError(f"--max-slots is at least 1; got {max_slots}.")
        self._devices = devices
        self._limit = min(len(devices.devices), max_slots or len(devices.devices))
        self._leases: list[SlotLease] = []
        self._lock_dir = Path(tempfile.gettempdir()) if lock_dir is None else lock_dir
        self._clock = clock
        self._survey: tuple[float, frozenset[int]] | None = None
        self._nvml = nvml
        if devices.kind == "cuda" and nvml is None:
            try:
                self._nvml = Nvml()
            except NvmlError as error:
                raise DeviceError(
                    f"NVML does not answer ({error}); GPUs cannot be shared safely without it."
                ) from error

    @property
    def kind(self) -> str:
        """``cuda`` or ``cpu``."""
        return self._devices.kind

    @property
    def devices(self) -> Devices:
        """All devices, taken or free."""
        return self._devices

    @property
    def total(self) -> int:
        """Slots that may be in use at once; GPUs that others use at present count, since they may become free."""
        return self._limit

    @property
    def free(self) -> int:
        """Slots that a launch could take now; GPUs that other processes use do not count."""
        return max(0, min(self._limit - self._taken_count(), len(self._available())))

    def _taken_count(self) -> int:
        return sum(len(lease.devices) for lease in self._leases)

    def _available(self) -> list[Device]:
        taken = {index for lease in self._leases for index in lease.indices}
        rest = [device for device in self._devices.devices if device.index not in taken]
        if self._nvml is None:
            return rest
        now = self._clock()
        if self._survey is None or now - self._survey[0] > _SURVEY_S:
            busy = frozenset(device.index for device in rest if self._in_use(device))
            self._survey = (now, busy)
        return [device for device in rest if device.index not in self._survey[1]]

    def _in_use(self, device: Device) -> bool:
        """Whether somebody else computes on a GPU that no launch of ours holds."""
        if self._nvml is None:
            return False
        if self._nvml.processes(device):
            return True
        return self._nvml.used_bytes(device) > _FOREIGN_SHARE * device.memory_bytes

    def take(self, slots: int) -> SlotLease:
        """Take slots for a launch, the lowest indices first.

        Raises:
            SlotsBusyError: If fewer are free.
        """
        self._survey = None
        candidates = self._available()
        if slots < 1 or min(self._limit - self._taken_count(), len(candidates)) < slots:
            raise SlotsBusyError(f"A launch asks for {slots} slots; {self.free} of {self.total} are free.")
        chosen, locks = self._lock(candidates, slots)
        self._survey = None
        lease = SlotLease(
            devices=tuple(chosen),
            baseline_bytes={device.index: self._unattributed_bytes(device, ()) for device in chosen},
            locks=tuple(locks),
        )
        self._leases.append(lease)
        return lease

    def _lock(self, candidates: list[Device], slots: int) -> tuple[list[Device], list[int]]:
        """Lock ``slots`` of the candidates against other tuners; on the CPU there is nothing to lock."""
        if self._nvml is None:
            return candidates[:slots], []
        chosen: list[Device] = []
        locks: list[int] = []
        for device in candidates:
            if len(chosen) == slots:
                break
            lock = _lock_file(self._lock_dir / f"optuna-dsat-gpu-{device.visible_id}.lock")
            if lock is not None:
                chosen.append(device)
                locks.append(lock)
        if len(chosen) < slots:
            _close_all(locks)
            raise SlotsBusyError(
                f"A launch asks for {slots} slots; {len(chosen)} are free, the others are taken by another optuna-dsat."
            )
        return chosen, locks

    def is_free(self, lease: SlotLease, own: Collection[ProcessKey] = ()) -> bool:
        """Whether the devices of an ended launch are free again, by measurement.

        A GPU is free when none of our processes is listed on it and the memory that is not explained by living
        processes of others is back to what it was before the launch, give or take 64 MiB. NVML lists numbers of the
        host inside some containers; such entries explain nothing, so the memory itself must come back. CPU ranks are
        free once their processes are gone, which the caller has made sure of.
        """
        if self._nvml is None:
            return True
        pids = {key.pid for key in own}
        for device in lease.devices:
            if pids & self._nvml.processes(device).keys():
                return False
            excess = self._unattributed_bytes(device, pids) - lease.baseline_bytes[device.index]
            if excess > _TOLERANCE_BYTES:
                return False
        return True

    def _unattributed_bytes(self, device: Device, own: Collection[int]) -> int:
        if self._nvml is None:
            return 0
        others = sum(
            used
            for pid, used in self._nvml.processes(device).items()
            if pid not in own and ProcessKey.of(pid) is not None
        )
        return max(0, self._nvml.used_bytes(device) - others)

    def describe_use(self, lease: SlotLease) -> str:
        """Say what still uses the devices of a launch, for a message."""
        if self._nvml is None:
            return "nothing"
        return "; ".join(
            f"GPU {device.index}: {self._nvml.used_bytes(device) / 2**30:.1f} GiB in use, "
            f"{lease.baseline_bytes[device.index] / 2**30:.1f} GiB before the launch, "
            f"processes {sorted(self._nvml.processes(device)) or 'not listed'}"
            for device in lease.devices
        )

    def give_back(self, lease: SlotLease) -> None:
        """Return the slots of a launch to the pool. A lease that is not held is ignored."""
        if lease in self._leases:
            self._leases.remove(lease)
            _close_all(lease.locks)
            self._survey = None


def _lock_file(path: Path) -> int | None:
    """Return a descriptor that holds the lock at ``path``, None where another process holds it."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o666)  # the umask must not keep another user's tuner from locking
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _close_all(descriptors: Collection[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
