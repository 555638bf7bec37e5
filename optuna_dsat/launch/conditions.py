"""Conditions of a launch on its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["Conditions"]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Facts on the machine while a launch measured its steps; None and empty stand for what is not known."""

    window_s: float | None = None
    """Length of the time that the facts are about, in seconds."""
    others_cpu_s: float | None = None
    """CPU seconds that processes which are not the launch's used in that time."""
    cores: int | None = None
    """Cores that the launch might use."""
    gpu_processes: tuple[str, ...] = ()
    """Other processes on the launch's GPUs, each in words."""
    throttle_reasons: tuple[str, ...] = ()
    """NVML's reasons for clocks below the highest, other than idleness, each in words."""
    isolation: str = ""
    """How the user's files were protected from the launch: ``mount``, ``python`` or ``off``; empty if unknown."""
    isolation_note: str = ""
    """Folders that no overlay could be mounted on, and why."""

    @property
    def others_share(self) -> float | None:
        """Share of the cores' time that other processes took; None if unknown."""
        if self.others_cpu_s is None or not self.window_s or not self.cores:
            return None
        return self.others_cpu_s / (self.window_s * self.cores)

    def to_json(self) -> dict[str, Any]:
        """Return the input of ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Conditions:
        """Build from the output of ``to_json`` of this version or another."""
        known = {one.name for one in fields(cls)}
        found: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**{name: value for name, value in found.items() if name in known})
