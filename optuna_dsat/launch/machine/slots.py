"""Allocation of slots (GPUs or CPU ranks) to launches; slots are returned once measured to be free."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.devices import Device, Devices
from optuna_dsat.launch.machine.nvml import DeviceError, Nvml, NvmlError
from optuna_dsat.launch.machine.owners import (
    GpuMonitor,
    Lock,
    holders_in_words,
    label,
    lock,
    lock_folder,
    lock_owner,
    lock_path,
    unlock,
)
from optuna_dsat.launch.protocol import Conditions, Holder, SlotsBusyError, SlotsTakenError
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.words import things_in_words

_SURVEY_S = 1.0
"""Time for which a survey of the GPUs used by other processes is reused."""


@dataclass(frozen=True, kw_only=True)
class SlotLease:
    """Devices of a launch."""

    devices: tuple[Device, ...]
    baseline_bytes: Mapping[int, int]
    """GPU index -> memory in use before the launch that is not attributed to living processes of others."""
    locks: tuple[Lock, ...] = ()
    """The GPUs' locks against other tuners on this machine."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Index of each device."""
        return tuple(device.index for device in self.devices)


class SlotPool:
    """The pool of devices for launches, of which at most ``max_slots`` are in use at a time.

    GPUs that other processes use, and GPUs that do not respond, are not taken. A lock file per GPU, in
    a folder of all users, keeps two tuners from taking the same GPU. Tuners in containers with a separate folder are
    detected by their processes or memory.

    Raises:
        UsageError: If ``max_slots`` is less than 1.
        DeviceError: If there are GPUs but NVML does not respond.
    """

    def __init__(
        self,
        devices: Devices,
        *,
        max_slots: int | None = None,
        nvml: Nvml | None = None,
        lock_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        if max_slots is not None and max_slots < 1:
            raise UsageError(f"--max-slots is at least 1; got {max_slots}.")
        self._devices = devices
        self.total = min(len(devices.devices), max_slots or len(devices.devices))
        """Slots that may be in use at once, including GPUs currently used by others."""
        self._leases: list[SlotLease] = []
        self._lock_dir = lock_folder() if lock_dir is None else lock_dir
        self._clock = clock
        self._survey: tuple[float, frozenset[int]] | None = None
        if devices.kind == "cuda" and nvml is None:
            try:
                nvml = Nvml()
            except NvmlError as error:
                raise DeviceError(
                    f"NVML does not answer ({error}); GPUs cannot be shared safely without it."
                ) from error
        self._gpus = None if nvml is None else GpuMonitor(nvml, on_notice=on_notice)
        """None on the CPU."""

    @property
    def kind(self) -> str:
        """``cuda`` or ``cpu``."""
        return self._devices.kind

    @property
    def free(self) -> int:
        """Slots that a launch could take now, excluding GPUs that other processes use."""
        return max(0, min(self.total - self._taken_count(), len(self._available())))

    def _taken_count(self) -> int:
        return sum(len(lease.devices) for lease in self._leases)

    def _available(self) -> list[Device]:
        taken = {index for lease in self._leases for index in lease.indices}
        rest = [device for device in self._devices.devices if device.index not in taken]
        if self._gpus is None:
            return rest
        now = self._clock()
        if self._survey is None or now - self._survey[0] > _SURVEY_S:
            busy = frozenset(device.index for device in rest if self._gpus.is_unavailable(device))
            self._survey = (now, busy)
        return [device for device in rest if device.index not in self._survey[1]]

    def places_of(self, lease: SlotLease) -> tuple[int, ...]:
        """Return the number of each of a launch's slots, from 0 to ``total`` - 1."""
        indices = [device.index for device in self._devices.devices]
        return tuple(indices.index(index) % self.total for index in lease.indices)

    def holders(self) -> tuple[Holder, ...]:
        """Measure and return the holders of the slots that are not free, in the order of the slots."""
        return tuple(holder for device in self._devices.devices for holder in self._holders_of(device))

    def _holders_of(self, device: Device) -> list[Holder]:
        name = label(device, kind=self.kind)
        if any(device.index in lease.indices for lease in self._leases):
            return [Holder(device=name, who="a launch of this search", own=True)]
        if self._gpus is None:
            return []
        return self._gpus.holders(device, lock_owner(self._lock_path(device)))

    def sight(self, lease: SlotLease, pids: Collection[int]) -> Conditions:
        """Return the activity of other processes on a launch's GPUs; nothing on the CPU."""
        seen = [] if self._gpus is None else [self._gpus.sight(device, pids) for device in lease.devices]
        return Conditions(
            gpu_processes=tuple(process for sight in seen for process in sight.gpu_processes),
            throttle_reasons=tuple(reason for sight in seen for reason in sight.throttle_reasons),
        )

    def energy_j(self, lease: SlotLease) -> float | None:
        """Return the reading of a launch's energy counters in joules, summed over its GPUs; None if any is unknown."""
        used = [None if self._gpus is None else self._gpus.energy_j(device) for device in lease.devices]
        known = [item for item in used if item is not None]
        return sum(known) if len(known) == len(used) else None

    def _lock_path(self, device: Device) -> Path:
        return lock_path(self._lock_dir, device.uuid or device.visible_id)

    def take(self, slots: int) -> SlotLease:
        """Take slots for a launch, the lowest indices first.

        Raises:
            SlotsBusyError: If fewer are free.
        """
        self._survey = None
        candidates = self._available()
        if slots < 1 or min(self.total - self._taken_count(), len(candidates)) < slots:
            asked = things_in_words(slots, "slot")
            raise SlotsBusyError(f"A launch asks for {asked}; {self.free} of {self.total} are free.")
        chosen, locks = self._lock(candidates, slots)
        self._survey = None
        if self._gpus is not None and self._gpus.indices_shifted:
            chosen = [replace(device, visible_id=device.certain_id) for device in chosen]
        lease = SlotLease(
            devices=tuple(chosen),
            baseline_bytes={} if self._gpus is None else {d.index: self._gpus.baseline_bytes(d) for d in chosen},
            locks=tuple(locks),
        )
        self._leases.append(lease)
        return lease

    def _lock(self, candidates: list[Device], slots: int) -> tuple[list[Device], list[Lock]]:
        """Lock ``slots`` of the candidates against other tuners; CPU ranks need no lock."""
        if self._gpus is None:
            return candidates[:slots], []
        chosen: list[Device] = []
        locks: list[Lock] = []
        for device in candidates:
            if len(chosen) == slots:
                break
            held = lock(self._lock_path(device))
            if held is not None:
                chosen.append(device)
                locks.append(held)
        if len(chosen) < slots:
            unlock(locks)
            raise SlotsTakenError(
                f"A launch asks for {things_in_words(slots, 'slot')}; {len(chosen)} are free, the others are taken by "
                "another optuna-dsat."
            )
        return chosen, locks

    def is_free(self, lease: SlotLease, keys: Collection[ProcessKey] = ()) -> bool:
        """Return whether the devices of an ended launch are measured to be free again.

        A GPU is free if NVML lists none of our processes on it and the memory not attributed to living processes of
        others is within 64 MiB of its value before the launch. NVML of some containers lists PIDs of the host, which
        get none.
        """
        if self._gpus is None:
            return True
        pids = {key.pid for key in keys}
        return all(
            self._gpus.is_free_of(device, pids, baseline_bytes=lease.baseline_bytes[device.index])
            for device in lease.devices
        )

    def describe_use(self, lease: SlotLease) -> str:
        """Describe the remaining use of a launch's devices."""
        if self._gpus is None:
            return "nothing"
        return "; ".join(
            self._gpus.use_in_words(device, baseline_bytes=lease.baseline_bytes[device.index])
            for device in lease.devices
        )

    def give_back(self, lease: SlotLease) -> None:
        """Return the slots of a launch to the pool. A lease that is not held is ignored."""
        if lease in self._leases:
            self._leases.remove(lease)
            unlock(lease.locks)
            self._survey = None


def only_free(devices: Devices, *, nvml: Nvml | None = None, lock_dir: Path | None = None) -> Devices:
    """Return the GPUs that are not in use, with a notice about the others; CPU ranks are returned unchanged.

    Raises:
        DeviceError: If none is free; names their holders.
    """
    if devices.kind != "cuda":
        return devices
    held = SlotPool(devices, nvml=nvml, lock_dir=lock_dir).holders()
    busy = {holder.device for holder in held}
    free = tuple(device for device in devices.devices if label(device, kind=devices.kind) not in busy)
    if not free:
        raise DeviceError(f"No GPU is free (--only-free-gpus). Not free: {holders_in_words(held)}.")
    if not held:
        return devices
    names = ", ".join(str(device.index) for device in free)
    notice = f"Tuning on GPU {names} (--only-free-gpus). Not free: {holders_in_words(held)}."
    return replace(devices, devices=free, notices=(*devices.notices, notice))
