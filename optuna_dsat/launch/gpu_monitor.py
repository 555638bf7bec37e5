"""The use of a pool's GPUs, measured through NVML."""

from __future__ import annotations

from collections.abc import Callable, Collection

from optuna_dsat.launch.beside import GpuSight
from optuna_dsat.launch.devices import Device
from optuna_dsat.launch.holders import another_tuner, foreign_holders, label
from optuna_dsat.launch.nvml import GpuUse, Nvml, NvmlError
from optuna_dsat.launch.processes import ProcessKey
from optuna_dsat.launch.protocol import Holder
from optuna_dsat.launch.slot_locks import LockOwner

__all__ = ["GpuMonitor"]

_TOLERANCE_BYTES = 64 * 2**20
"""Memory that may stay in use above the baseline: drivers keep a few MiB, a CUDA context takes 200 or more."""


class GpuMonitor:
    """Measures GPUs, and reports when one stops answering or answers again.

    Args:
        nvml: NVML.
        on_notice: Called with these reports.
    """

    def __init__(self, nvml: Nvml, *, on_notice: Callable[[str], None]) -> None:
        self._nvml = nvml
        self._on_notice = on_notice
        self._errors: dict[int, str] = {}
        """Index of each GPU that does not answer -> NVML's error."""
        self.indices_shifted = False
        """Whether a GPU was ever missing, after which CUDA may number the others differently."""

    def _use(self, device: Device) -> GpuUse | None:
        """Return a GPU's use; None if it does not answer."""
        name = label(device, kind="cuda")
        try:
            use = self._nvml.use(device.nvml_id)
        except NvmlError as error:
            if device.index not in self._errors:
                self._on_notice(f"{name} does not answer any more ({error}): launches leave it out.")
            self._errors[device.index] = str(error)
            self.indices_shifted = True
            return None
        if self._errors.pop(device.index, None) is not None:
            self._on_notice(f"{name} answers again.")
        return use

    def is_unavailable(self, device: Device) -> bool:
        """Return whether others compute on a GPU that no launch of ours holds, or it does not answer."""
        use = self._use(device)
        return use is None or bool(foreign_holders(device, use, self._nvml))

    def holders(self, device: Device, owner: LockOwner | None) -> list[Holder]:
        """Return the holders of a GPU that no launch of ours holds.

        Args:
            device: The GPU.
            owner: Owner of its lock; None if it is not locked.
        """
        use = self._use(device)
        if owner is not None:
            return [another_tuner(device, owner, use)]
        if use is None:
            name = label(device, kind="cuda")
            return [Holder(device=name, who=f"it does not answer ({self._errors[device.index]})")]
        return foreign_holders(device, use, self._nvml)

    def baseline_bytes(self, device: Device) -> int:
        """Return the memory in use that no living process accounts for; 0 if unknown."""
        return _unattributed_bytes(self._use(device), ())

    def is_free_of(self, device: Device, own: Collection[int], *, baseline_bytes: int) -> bool:
        """Return whether none of our processes, by number, is listed on a GPU and the memory is back to its baseline.

        A GPU that does not answer counts as free; it is not taken until it answers.
        """
        use = self._use(device)
        if use is None:
            return True
        if set(own) & (use.processes or {}).keys():
            return False
        return _unattributed_bytes(use, own) - baseline_bytes <= _TOLERANCE_BYTES

    def sight(self, device: Device, own: Collection[int]) -> GpuSight:
        """Return what goes on beside a launch on one of its GPUs.

        Where NVML lists none of the launch's processes, as in a container with numbers of its own, it is not known
        which are others'.

        Args:
            device: The GPU.
            own: Numbers of the launch's processes.
        """
        use, gpu = self._use(device), label(device, kind="cuda")
        if use is None:
            return GpuSight()
        processes = use.processes or {}
        others = {pid: used for pid, used in processes.items() if pid not in own} if set(own) & set(processes) else {}
        holders = foreign_holders(device, GpuUse(used_bytes=None, processes=others), self._nvml)
        try:
            reasons = self._nvml.throttle_reasons(device.nvml_id)
        except NvmlError:
            reasons = ()
        return GpuSight(
            processes=tuple(f"{holder.who} on {gpu}" for holder in holders),
            throttle_reasons=tuple(f"{reason} on {gpu}" for reason in reasons),
        )

    def use_in_words(self, device: Device, *, baseline_bytes: int) -> str:
        """Return memory and processes of a GPU, in words."""
        use, name = self._use(device), label(device, kind="cuda")
        if use is None:
            return f"{name} does not answer"
        used = "memory in use not known" if use.used_bytes is None else f"{use.used_bytes / 2**30:.1f} GiB in use"
        return (
            f"{name}: {used}, {baseline_bytes / 2**30:.1f} GiB before the launch, "
            f"processes {sorted(use.processes or ()) or 'not listed'}"
        )


def _unattributed_bytes(use: GpuUse | None, own: Collection[int]) -> int:
    """Return the memory in use that no living process of others accounts for; 0 if unknown."""
    if use is None or use.used_bytes is None:
        return 0
    others = sum(
        used for pid, used in (use.processes or {}).items() if pid not in own and ProcessKey.of(pid) is not None
    )
    return max(0, use.used_bytes - others)
