"""Conditions under which knobs change DeepSpeed's behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ZERO_STAGE = "zero_stage"
ZERO_STAGES = (0, 1, 2, 3)
OFFLOAD_OPTIMIZER = "offload_optimizer"
OFFLOAD_PARAM = "offload_param"
NVME = "offload_optimizer_nvme"
_GROUPS = 4
"""Sub-groups of a rank of which a quarter can stay on the device."""


@dataclass(frozen=True)
class Site:
    """Facts, besides the params drawn so far, on which the conditions of knobs depend."""

    pipeline: bool = False
    """Whether the script trains a pipeline module."""
    bf16_optimizer: bool = False
    """Whether bf16 is used with fp32 gradient accumulation: ZeRO 1 then runs ``BF16_Optimizer`` without offload."""
    prescaled: bool = False
    """Whether gradients are prescaled (``prescale_gradients``, ``gradient_predivide_factor``): ZeRO 2 and 3 then refuse
    ``reduce_scatter``.
    """
    sequential: bool = False
    """Whether ``stage3_allgather_sequential`` is set: ZeRO 3 then sets its prefetch bucket to 1."""
    nvme_only: bool = False
    """Whether the optimizer may be offloaded to NVMe only, which ZeRO 1 and 2 do not support."""
    one_rank: bool = False
    """Whether a launch has a single rank and hence no communication."""
    cpu_adam: bool = False
    """Whether DeepSpeed builds its Adam with decoupled weight decay, which a host and a GPU can share."""
    owned: int | None = None
    """Trainable parameters of a rank's partition; None if unknown."""


Condition = Callable[[Mapping[str, Any], Site], bool]
"""Whether something holds for the params drawn so far at a site."""


def stage_of(params: Mapping[str, Any]) -> int:
    """Return the ZeRO stage."""
    return int(params.get(ZERO_STAGE, 0))


def offloads(params: Mapping[str, Any]) -> bool:
    """Return whether the optimizer is offloaded."""
    return bool(params.get(OFFLOAD_OPTIMIZER, "none") != "none")


def reduces_gradients(params: Mapping[str, Any], site: Site) -> bool:
    """Return whether ZeRO's gradient reduction runs."""
    stage = stage_of(params)
    return stage >= 2 or (stage == 1 and not (site.bf16_optimizer and not offloads(params)))


def contiguous_applies(params: Mapping[str, Any], site: Site) -> bool:
    """Return whether ``contiguous_gradients`` is read."""
    return reduces_gradients(params, site) and (stage_of(params) == 3 or not offloads(params))


def _is_contiguous(params: Mapping[str, Any], site: Site) -> bool:
    return not contiguous_applies(params, site) or bool(params.get("contiguous_gradients", True))


def scatter_applies(params: Mapping[str, Any], site: Site) -> bool:
    """Return whether ``reduce_scatter`` is read, and allowed."""
    if not reduces_gradients(params, site) or not _is_contiguous(params, site):
        return False
    return not (site.prescaled and stage_of(params) >= 2)


def overlap_applies(params: Mapping[str, Any], site: Site) -> bool:
    """Return whether ``overlap_comm`` is read."""
    if not reduces_gradients(params, site) or site.pipeline:
        return False
    return not site.one_rank or stage_of(params) == 3 or offloads(params)


def may_be_shared(params: Mapping[str, Any], site: Site) -> bool:
    """Return whether the smallest share of a rank's sub-groups can stay on the device."""
    groups = (site.owned or 0) // max(1, params.get("sub_group_size", 1_000_000_000))
    return offloads(params) and not params.get(NVME) and site.cpu_adam and (site.owned is None or groups >= _GROUPS)


def may_lack_hooks(params: Mapping[str, Any]) -> bool:
    """Return whether the engine makes its hooks by ``overlap_comm``: ZeRO 1 without contiguous gradients."""
    return stage_of(params) == 1 and params.get("contiguous_gradients") is False


def offloads_params(params: Mapping[str, Any]) -> bool:
    """Return whether parameters are offloaded: the persistent ones are then on the device from the start."""
    return bool(params.get(OFFLOAD_PARAM, "none") != "none")
