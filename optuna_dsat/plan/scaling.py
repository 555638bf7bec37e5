"""Compare the fastest plan at each number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optuna_dsat.cost.gpus import latency_prior
from optuna_dsat.plan.prediction import Subject
from optuna_dsat.plan.rows import Plan, PlannedRow, plan_rows


@dataclass(frozen=True, kw_only=True)
class AtCount:
    """The fastest plan on a number of devices."""

    devices: int
    row: PlannedRow | None
    """The plan's row; None if nothing fits."""
    share_of_linear: float | None
    """Samples/s per device relative to the smallest number of devices without offload, or else to the smallest that
    fits; None if nothing fits.
    """

    @property
    def samples_per_s(self) -> float | None:
        """Samples/s over all devices; None if nothing fits."""
        return None if self.row is None else self.row.samples_per_s

    @property
    def samples_per_s_each(self) -> float | None:
        """Samples/s per device; None if nothing fits."""
        return None if self.row is None else self.row.samples_per_s / self.devices

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "devices": self.devices,
            "name": None if self.row is None else self.row.name,
            "micro_batch": None if self.row is None else self.row.micro_batch,
            "samples_per_s": self.samples_per_s,
            "samples_per_s_per_device": self.samples_per_s_each,
            "share_of_linear": self.share_of_linear,
        }


def counts_up_to(devices: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on below ``devices``, and that number itself."""
    return (*(2**power for power in range(devices.bit_length()) if 2**power < devices), devices)


def scaling(subject: Subject, counts: Sequence[int]) -> tuple[AtCount, ...]:
    """Return the fastest plan at each number of devices; structure and micro-batch may differ.

    The memory of a host does not depend on the number of devices in use.

    Args:
        subject: Model and machine.
        counts: Numbers of devices, in ascending order; a host is filled before the next is used.
    """
    result: list[AtCount] = []
    for count in counts:
        smaller = _with_devices(subject, count)
        row = Plan(subject=smaller, rows=plan_rows(smaller)).recommended
        result.append(AtCount(devices=count, row=row, share_of_linear=None))
    rows = [item for item in result if item.row is not None]
    whole = [item for item in rows if item.row is not None and not item.row.structure.offloads]
    least = next((item.samples_per_s_each for item in whole or rows), None)
    return tuple(
        replace(item, share_of_linear=item.samples_per_s_each / least if item.samples_per_s_each and least else None)
        for item in result
    )


def _with_devices(subject: Subject, count: int) -> Subject:
    hardware, machine = subject.hardware, dict(subject.machine)
    if hardware.device != "cpu" and "latency" in machine:
        machine["latency"] = latency_prior(count)
    each = min(count, hardware.ranks_per_node)
    return replace(subject, hardware=replace(hardware, world_size=count, ranks_per_node=each), machine=machine)
