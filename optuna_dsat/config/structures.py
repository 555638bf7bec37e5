"""Where model states live: the ZeRO stage and what is offloaded, with its words, its config and the order of tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["GUIDE_ORDER", "STRUCTURES", "Structure"]

_NONE, _CPU, _NVME = "none", "cpu", "nvme"


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A ZeRO stage with its offloads."""

    stage: int
    offload_optimizer: str = _NONE
    """Device of the optimizer's states: ``none`` (the accelerator), ``cpu`` or ``nvme``."""
    offload_param: str = _NONE
    """Device of the parameters; as above."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Structure:
        """Return the structure of a DeepSpeed config; ZeRO 0 without offload where it has no ZeRO section."""
        zero = config.get("zero_optimization") or {}
        devices = {key: (zero.get(key) or {}).get("device", _NONE) for key in ("offload_optimizer", "offload_param")}
        return cls(stage=zero.get("stage", 0), **devices)

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded."""
        return self.offload_optimizer != _NONE or self.offload_param != _NONE

    def on_nvme(self) -> Structure:
        """Return the structure with what it offloads on NVMe."""
        return replace(
            self,
            offload_optimizer=_NONE if self.offload_optimizer == _NONE else _NVME,
            offload_param=_NONE if self.offload_param == _NONE else _NVME,
        )

    @property
    def words(self) -> str:
        """What people read, such as ``ZeRO 2 + optimizer offload``."""
        parts = [
            f"{word} offload" + (" to NVMe" if device == _NVME else "")
            for word, device in (("parameter", self.offload_param), ("optimizer", self.offload_optimizer))
            if device != _NONE
        ]
        return f"ZeRO {self.stage}" + (f" + {' and '.join(parts)}" if parts else "")

    def zero_section(self, *, nvme_path: str | None = None) -> dict[str, Any]:
        """Return ``zero_optimization`` with stage and offloads alone; None removes an offload that a config sets.

        Args:
            nvme_path: Folder for what is offloaded to NVMe.
        """
        section: dict[str, Any] = {"stage": self.stage}
        for key, device in (("offload_optimizer", self.offload_optimizer), ("offload_param", self.offload_param)):
            section[key] = None if device == _NONE else {"device": device}
            if device == _NVME:
                section[key]["nvme_path"] = nvme_path
        return section


STRUCTURES = (
    Structure(stage=0),
    Structure(stage=1),
    Structure(stage=1, offload_optimizer=_CPU),
    Structure(stage=2),
    Structure(stage=2, offload_optimizer=_CPU),
    Structure(stage=3),
    Structure(stage=3, offload_optimizer=_CPU),
    Structure(stage=3, offload_param=_CPU),
    Structure(stage=3, offload_param=_CPU, offload_optimizer=_CPU),
)
"""Every structure that offloads to the CPU at most, in rising order of the device memory that it saves."""

GUIDE_ORDER = tuple(one for one in STRUCTURES if one != Structure(stage=3, offload_optimizer=_CPU))
"""The order of tries of the DeepSpeed configuration guide, fastest first: at ZeRO 3 it offloads the parameters before
the optimizer.
"""
