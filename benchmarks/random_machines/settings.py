"""A DeepSpeed config as far as it decides times and memory of a launch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STAGE0_BUCKET = 500_000_000
"""Elements that DeepSpeed reduces at a time without ZeRO."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A DeepSpeed config without its micro-batch, as far as it matters.

    Defaults are those of ``deepspeed.runtime.zero.config`` in DeepSpeed 0.19.8.
    """

    accumulation: int
    stage: int
    offload_optimizer: bool
    offload_param: bool
    contiguous: bool
    overlap: bool
    reduce_scatter: bool
    bucket: float
    prefetch: float
    max_live: float
    max_reuse: float
    persistence: float
    sub_group: float
    ratio: float
    """Share of the optimizer that is offloaded, in whole sub-groups."""

    def host_share(self, owned: float) -> float:
        """Return the share of the optimizer on the host, given the parameters that a rank owns; 0 without offload."""
        if not self.offload_optimizer or self.ratio == 1:
            return float(self.offload_optimizer)
        groups = math.ceil(owned / self.sub_group)
        return 1 - math.floor((1 - self.ratio) * groups) / groups

    @classmethod
    def of(cls, ds_config: Mapping[str, Any]) -> Settings:
        """Read a whole DeepSpeed config. The all-gather bucket has no effect with torch 1.13 or newer."""
        zero = ds_config.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))

        def flag(key: str, default: bool) -> bool:
            value = zero.get(key)
            return default if value is None else bool(value)

        def size(key: str, default: float) -> float:
            value = zero.get(key)
            return default if value is None else float(value)

        def offloaded(key: str) -> bool:
            return bool((zero.get(key) or {}).get("device", "none") != "none")

        offload = stage > 0 and offloaded("offload_optimizer")
        return cls(
            accumulation=int(ds_config.get("gradient_accumulation_steps") or 1),
            stage=stage,
            offload_optimizer=offload,
            offload_param=stage == 3 and offloaded("offload_param"),
            contiguous=flag("contiguous_gradients", True) or (offload and stage < 3),
            overlap=flag("overlap_comm", stage == 3),
            reduce_scatter=flag("reduce_scatter", True),
            bucket=size("reduce_bucket_size", 5e8) if stage else _STAGE0_BUCKET,
            prefetch=size("stage3_prefetch_bucket_size", 5e7),
            max_live=size("stage3_max_live_parameters", 1e9),
            max_reuse=size("stage3_max_reuse_distance", 1e9),
            persistence=size("stage3_param_persistence_threshold", 1e5),
            sub_group=size("sub_group_size", 1e9),
            ratio=float((zero.get("offload_optimizer") or {}).get("ratio", 1.0)) if offload and stage == 3 else 1.0,
        )


def structure_of(settings: Settings) -> tuple[int, bool, bool]:
    """Return ZeRO stage, optimizer offload and parameter offload."""
    return settings.stage, settings.offload_optimizer, settings.offload_param
