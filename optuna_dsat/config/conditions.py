"""Knobs as a type, and the conditions under which they change DeepSpeed's behaviour."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from optuna_dsat.runtime.overlay import COMPILE, ZERO, flatten

ZERO_STAGE = "zero_stage"
ZERO_STAGES = (0, 1, 2, 3)
OFFLOAD_OPTIMIZER = "offload_optimizer"
OFFLOAD_PARAM = "offload_param"
NVME = "offload_optimizer_nvme"
BF16 = "bf16"
BF16_STATES = "bf16_optimizer_states"
BF16_MASTER = "bf16_master_weights_and_grads"
PREFETCH, REUSE = "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"
WITH_PARAMS_ON_NVME = MappingProxyType({PREFETCH: 0, REUSE: 0})
"""Settings of parameters on NVMe, which DeepSpeed 0.19.8 reads into five swap buffers.

A parameter that is kept for reuse occupies its buffer, so that there is none for others. The prefetcher reads a
parameter twice if it is the last of the forward pass and the first of the backward pass. Either ends the training
(``AsyncPartitionedParameterSwapper.swap_in``).
"""
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
    experts: bool = False
    """Whether the model has experts of DeepSpeed's MoE: ZeRO 1 and 2 then require ``reduce_scatter``, and ZeRO 2
    ``contiguous_gradients`` (``DeepSpeedZeroOptimizer._configure_moe_settings``).
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
    bf16: bool = False
    """Whether the config trains in bf16."""


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
    """Return whether ``contiguous_gradients`` is read, and may be disabled."""
    if site.experts and stage_of(params) == 2:
        return False
    return reduces_gradients(params, site) and (stage_of(params) == 3 or not offloads(params))


def scatter_applies(params: Mapping[str, Any], site: Site) -> bool:
    """Return whether ``reduce_scatter`` is read, and allowed."""
    if not reduces_gradients(params, site) or (site.experts and stage_of(params) < 3):
        return False
    if contiguous_applies(params, site) and not params.get("contiguous_gradients", True):
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


def bf16_states_apply(params: Mapping[str, Any], site: Site) -> bool:
    """Return whether ZeRO can keep the optimizer's states in bf16: an offloaded optimizer must be DeepSpeed's Adam."""
    if not params.get(BF16, site.bf16) or params.get(NVME) or not reduces_gradients(params, site):
        return False
    return not offloads(params) or site.cpu_adam


def bf16_master_applies(params: Mapping[str, Any], site: Site) -> bool:
    """Return whether ZeRO can keep the master weights alone in bf16: with the optimizer offloaded."""
    return offloads(params) and bf16_states_apply(params, site) and not params.get(BF16_STATES)


def needs_zero(config: Mapping[str, Any], *, searched: Collection[str]) -> bool:
    """Return whether a config has states in half precision that ZeRO 0 refuses and no knob of ``searched`` drops."""
    flat = flatten(config)
    names = [f"bf16.{name}" for name in (BF16_MASTER, BF16_STATES) if name not in searched]
    return any(flat.get(name) is True for name in ("fp16.fp16_master_weights_and_grads", *names))


def may_lack_hooks(params: Mapping[str, Any]) -> bool:
    """Return whether the engine makes its hooks by ``overlap_comm``: ZeRO 1 without contiguous gradients."""
    return stage_of(params) == 1 and params.get("contiguous_gradients") is False


def offloads_params(params: Mapping[str, Any]) -> bool:
    """Return whether parameters are offloaded: the persistent ones are then on the device from the start."""
    return bool(params.get(OFFLOAD_PARAM, "none") != "none")


def swaps_params(params: Mapping[str, Any]) -> bool:
    """Return whether parameters are offloaded to NVMe."""
    return params.get(OFFLOAD_PARAM) == "nvme"


Kind = str
"""``stage``, ``flag``, ``size`` (a number of elements), ``ranks``, ``device`` (``none``, ``cpu``, ``nvme``), ``share``
(0 to 1), ``modules`` (whether modules of classes that the profile names are meant), ``section`` (whether a section of
settings is there) or ``blocks`` (1 for every block, 2 for every second, 0 for none).
"""

_OLDEST = "0.14.0"
"""Oldest DeepSpeed that is supported."""
_MANUAL = "deepspeed.ai/docs/config-json"


@dataclass(frozen=True)
class Knob:
    """A DeepSpeed setting that the search may change."""

    name: str
    """Name of the Optuna parameter: DeepSpeed's own key."""
    path: tuple[str, ...]
    """Keys of the value in a DeepSpeed config, outermost first."""
    stages: tuple[int, ...]
    """ZeRO stages at which DeepSpeed reads it."""
    where: str
    """Description of stages and condition, shown to users."""
    used_by: str
    """Place in DeepSpeed 0.19.8 that uses it, and the reason for its condition."""
    kind: Kind = "flag"
    choices: tuple[Any, ...] = (False, True)
    """Default choices, ascending."""
    default: Any = False
    """DeepSpeed's default; None where it depends on the stage."""
    condition: Condition = lambda _params, _site: True
    """Whether it changes DeepSpeed's behaviour at these stages, given the params drawn before."""
    source: str = _MANUAL
    """Paper, pull request or manual that describes it."""
    since: str = _OLDEST
    """First version of DeepSpeed that has it, of the supported versions."""
    is_exact: bool = True
    """Whether training computes the same as without it, up to rounding; else it is searched with ``--allow lossy``."""
    live: tuple[int, ...] = ()
    """ZeRO stages at which a running engine follows it (``runtime.measure.live``)."""
    static_if: Callable[[Mapping[str, Any]], bool] = lambda _params: False
    """Whether a running engine does not follow it even at these stages, given all params."""
    effect: float = 1.0
    """Expected effect on the speed relative to other knobs: the scale of its prior (``guided.residual_gp``)."""
    inert: bool = False
    """Whether DeepSpeed accepts the value without using it: sampled only if the user lists values."""
    on_demand: bool = False
    """Whether it is useful for some models only: sampled if the profile shows this, or where the user names it."""
    several_nodes: bool = False
    """Whether it is useful on several nodes only: sampled on a single node only if the user lists values."""
    several_ranks: bool = False
    """Whether it is useful with several ranks only: sampled with a single rank only if the user lists values."""

    @property
    def key(self) -> str:
        """Its dotted key in a DeepSpeed config."""
        return ".".join(self.path)

    @property
    def is_in_offload(self) -> bool:
        """Whether it is a detail of an offload, in the section of its device."""
        return len(self.path) > 2 and self.kind != "device" and self.name != NVME

    @property
    def is_of_zero(self) -> bool:
        """Whether it is a key of ``zero_optimization``."""
        return self.path[0] == ZERO

    @property
    def permission(self) -> str:
        """Value of ``--allow`` without which it is not searched; empty for none."""
        return "lossy" if not self.is_exact else COMPILE if COMPILE in self.path else ""

    def value_in(self, zero: Mapping[str, Any]) -> Any:
        """Return its value as written in ``ds_config.knob_settings``; None if it is not given."""
        value = zero.get(self.path[1])
        if len(self.path) > 2 and isinstance(value, Mapping):
            return value.get(self.path[2])
        return None if self.is_in_offload else value

    def applies(self, params: Mapping[str, Any], site: Site) -> bool:
        """Return whether it changes DeepSpeed's behaviour, given the params drawn before."""
        return stage_of(params) in self.stages and self.condition(params, site)

    def is_live(self, params: Mapping[str, Any]) -> bool:
        """Return whether a running engine with these params follows it."""
        return stage_of(params) in self.live and not self.static_if(params)
