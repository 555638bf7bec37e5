"""Structures (ZeRO stage and offloads of a configuration): names, configs, and the order in which to try them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from optuna_dsat.config.conditions import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, WITH_PARAMS_ON_NVME
from optuna_dsat.config.ds_config import ZERO, offload_device

_NONE, _CPU, _NVME = "none", "cpu", "nvme"


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A ZeRO stage with its offloads."""

    stage: int
    offload_optimizer: str = _NONE
    """Target of the optimizer's states: ``cpu``, ``nvme``, or ``none`` if they stay on the accelerator."""
    offload_param: str = _NONE
    """Target of the parameters: ``cpu``, ``nvme`` or ``none``."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Structure:
        """Return the structure of a DeepSpeed config; ZeRO 0 without offload if it has no ZeRO section."""
        zero = config.get(ZERO) or {}
        devices = {key: offload_device(zero.get(key)) for key in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)}
        stage = zero.get("stage", 0)
        return cls(stage=int(stage) if isinstance(stage, float) else stage, **devices)

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded."""
        return self.offload_count > 0

    @property
    def offload_count(self) -> int:
        """Number of offloads: optimizer states, parameters."""
        return sum(device != _NONE for device in (self.offload_optimizer, self.offload_param))

    @property
    def nvme_count(self) -> int:
        """Number of offloads to NVMe."""
        return sum(device == _NVME for device in (self.offload_optimizer, self.offload_param))

    def on_nvme(self) -> Structure:
        """Return the structure with its offloads moved to NVMe."""
        return replace(
            self,
            offload_optimizer=_NONE if self.offload_optimizer == _NONE else _NVME,
            offload_param=_NONE if self.offload_param == _NONE else _NVME,
        )

    @property
    def words(self) -> str:
        """Name of the structure, such as ``ZeRO 2 + optimizer offload``."""
        parts = [
            f"{word} offload" + (" to NVMe" if device == _NVME else "")
            for word, device in (("parameter", self.offload_param), ("optimizer", self.offload_optimizer))
            if device != _NONE
        ]
        return f"ZeRO {self.stage}" + (f" + {' and '.join(parts)}" if parts else "")

    def zero_section(
        self, *, nvme_path: str | None = None, swap_settings: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return a ZeRO section with only stage and offloads; None removes an offload of the base.

        ``nvme_path`` and ``swap_settings`` are for offloads to ``nvme``.
        """
        section: dict[str, Any] = {"stage": self.stage}
        for key, device in ((OFFLOAD_OPTIMIZER, self.offload_optimizer), (OFFLOAD_PARAM, self.offload_param)):
            section[key] = None if device == _NONE else {"device": device}
            if device == _NVME:
                section[key] |= {"nvme_path": nvme_path, **(swap_settings if key == OFFLOAD_PARAM else {})}
        if self.offload_param == _NVME:
            section |= WITH_PARAMS_ON_NVME
        return section


MAX_IN_CPU = 1_000_000_000
"""Default of ``offload_param.max_in_cpu``, in elements of a rank."""
_BUFFER_UNIT = 1_000_000


def param_swap_settings(zero: Mapping[str, Any], *, params: int, largest_layer: int, ranks: int) -> dict[str, int]:
    """Return settings for parameters on NVMe where DeepSpeed's defaults do not fit and the user gives none.

    A swap buffer contains the partition of a single parameter: DeepSpeed fails if it is larger than ``buffer_size``,
    and page-locks ``buffer_count`` of them. With ``fast_init`` they contain sub-groups of the optimizer as well, and
    keep their default size. Of each rank's partition the first ``max_in_cpu`` elements stay in host memory: by default,
    nothing is on NVMe alone unless a partition has more (``swap_tensor.partitioned_param_swapper`` of 0.19.8).

    Args:
        zero: The user's ``zero_optimization`` section.
        params: Parameters of the model.
        largest_layer: Parameters of the largest module that has parameters itself.
        ranks: Data-parallel ranks.
    """
    units = -(-largest_layer // ranks // _BUFFER_UNIT)
    settings = {"buffer_size": units * _BUFFER_UNIT}
    if (zero.get(OFFLOAD_OPTIMIZER) or {}).get("fast_init"):
        settings = {}
    if params <= ranks * MAX_IN_CPU:
        settings["max_in_cpu"] = 0
    return {key: value for key, value in settings.items() if key not in (zero.get(OFFLOAD_PARAM) or {})}


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
"""All structures without NVMe, by ascending saving of device memory."""

GUIDE_ORDER = tuple(structure for structure in STRUCTURES if structure != Structure(stage=3, offload_optimizer=_CPU))
"""Order of the DeepSpeed configuration guide, fastest first: at ZeRO 3 it offloads parameters before the optimizer."""
