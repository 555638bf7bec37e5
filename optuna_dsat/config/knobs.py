"""Knobs: every DeepSpeed setting that the search may change, its condition, and its default choices.

The condition of a knob is from DeepSpeed's source (``used_by`` names the place), and doubtful cases were tested. A
knob is sampled only if it changes DeepSpeed's behaviour; otherwise it would multiply equivalent configurations.

Every DeepSpeed from 0.14.5 on has the keys of all knobs, with the same defaults (``tests/config/test_knobs.py``
compares the installed versions), so no knob has a first version. A knob that an older version lacks needs one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optuna_dsat.config.documents import as_written
from optuna_dsat.config.ds_config import MICRO_BATCH, ZERO
from optuna_dsat.config.misspelt import near_key
from optuna_dsat.errors import ConfigError
from optuna_dsat.runtime.overlay import CHECKPOINT_EVERY, MODEL

__all__ = [
    "CHECKPOINT_EVERY",
    "KNOBS",
    "MODEL",
    "NAMES",
    "NVME",
    "OFFLOAD_OPTIMIZER",
    "OFFLOAD_PARAM",
    "PARTITION_COPY",
    "ZERO_STAGE",
    "ZERO_STAGES",
    "Kind",
    "Knob",
    "Site",
    "known_names",
    "normalise",
    "resolve_names",
]

ZERO_STAGE = "zero_stage"
ZERO_STAGES = (0, 1, 2, 3)
OFFLOAD_OPTIMIZER = "offload_optimizer"
OFFLOAD_PARAM = "offload_param"
NVME = "offload_optimizer_nvme"
PARTITION_COPY = "zero_hpz_partition_size"

Kind = str
"""``stage``, ``flag``, ``size`` (a number of elements), ``ranks``, ``device`` (``none``, ``cpu``, ``nvme``) or
``blocks`` (1 for every block, 2 for every second, 0 for none).
"""

_BUCKETS = tuple(n * 10**m for m in range(6, 10) for n in (1, 5))
"""dsat's defaults: n * 10^m elements for n in (1, 5), m in 6..9."""


@dataclass(frozen=True, kw_only=True)
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


Condition = Callable[[Mapping[str, Any], Site], bool]


def _stage(params: Mapping[str, Any]) -> int:
    return int(params.get(ZERO_STAGE, 0))


def _offloads(params: Mapping[str, Any]) -> bool:
    return bool(params.get(OFFLOAD_OPTIMIZER, "none") != "none")


def _zero_reduces_gradients(params: Mapping[str, Any], site: Site) -> bool:
    """Return whether ZeRO's gradient reduction runs."""
    stage = _stage(params)
    return stage >= 2 or (stage == 1 and not (site.bf16_optimizer and not _offloads(params)))


def _contiguous_applies(params: Mapping[str, Any], site: Site) -> bool:
    return _zero_reduces_gradients(params, site) and (_stage(params) == 3 or not _offloads(params))


def _is_contiguous(params: Mapping[str, Any], site: Site) -> bool:
    return not _contiguous_applies(params, site) or bool(params.get("contiguous_gradients", True))


def _scatter_applies(params: Mapping[str, Any], site: Site) -> bool:
    if not _zero_reduces_gradients(params, site) or not _is_contiguous(params, site):
        return False
    return not (site.prescaled and _stage(params) >= 2)


def _overlap_applies(params: Mapping[str, Any], site: Site) -> bool:
    if not _zero_reduces_gradients(params, site) or site.pipeline:
        return False
    return not site.one_rank or _stage(params) == 3 or _offloads(params)


def _is_stage3(params: Mapping[str, Any], _: Site) -> bool:
    return _stage(params) == 3


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A DeepSpeed setting that the search may change."""

    name: str
    """Name of the Optuna parameter: DeepSpeed's own key."""
    path: tuple[str, ...]
    """Keys of the value in a DeepSpeed config, outermost first."""
    kind: Kind
    choices: tuple[Any, ...]
    """Default choices, ascending."""
    where: str
    """Description of the condition, shown to users."""
    used_by: str
    """Place in DeepSpeed 0.19.8 that uses it, and the reason for its condition."""
    applies: Condition
    """Whether it changes DeepSpeed's behaviour, given the params drawn before."""
    inert: bool = False
    """Whether DeepSpeed accepts the value without using it: sampled only if the user lists values."""
    several_nodes: bool = False
    """Whether it is useful on several nodes only: sampled on a single node only if the user lists values."""
    several_ranks: bool = False
    """Whether it is useful with several ranks only: sampled with a single rank only if the user lists values."""

    @property
    def is_of_model(self) -> bool:
        """Whether it changes the model instead of the DeepSpeed config (``runtime.adapt.checkpointing``)."""
        return self.path[0] == MODEL


KNOBS: tuple[Knob, ...] = (
    Knob(
        name=ZERO_STAGE,
        path=(ZERO, "stage"),
        kind="stage",
        choices=ZERO_STAGES,
        where="always; 0 and 1 with pipeline parallelism",
        used_by="engine.DeepSpeedEngine._configure_zero_optimizer; pipe.engine.PipelineEngine asserts stage < 2.",
        applies=lambda _params, _site: True,
    ),
    Knob(
        name=OFFLOAD_OPTIMIZER,
        path=(ZERO, OFFLOAD_OPTIMIZER, "device"),
        kind="device",
        choices=("none", "cpu"),
        where="ZeRO 1, 2, 3",
        used_by=(
            "zero.stage_1_and_2.DeepSpeedZeroOptimizer.__init__ (cpu_offload) for stages 1 and 2, "
            "zero.stage3.DeepSpeedZeroOptimizer_Stage3._configure_offloading. Older guides allow stages 2 and 3 only; "
            "today's offload_config documents and runs stage 1, too. Stage 0 has no ZeRO optimizer to offload."
        ),
        applies=lambda params, site: _stage(params) == 3 or (_stage(params) >= 1 and not site.nvme_only),
    ),
    Knob(
        name=NVME,
        path=(ZERO, OFFLOAD_OPTIMIZER, "device"),
        kind="flag",
        choices=(False, True),
        where="ZeRO 3 with optimizer offload, where an NVMe path is given",
        used_by=(
            "zero.stage3.DeepSpeedZeroOptimizer_Stage3._configure_tensor_swapping. Stages 1 and 2 take nvme and "
            "offload to the CPU. A knob of its own, because an Optuna parameter has the same choices at every stage."
        ),
        applies=lambda params, _site: _stage(params) == 3 and _offloads(params),
    ),
    Knob(
        name=OFFLOAD_PARAM,
        path=(ZERO, OFFLOAD_PARAM, "device"),
        kind="device",
        choices=("none", "cpu"),
        where="ZeRO 3",
        used_by="zero.stage3.DeepSpeedZeroOptimizer_Stage3._configure_offloading; stages below 3 never look at it.",
        applies=_is_stage3,
    ),
    Knob(
        name="contiguous_gradients",
        path=(ZERO, "contiguous_gradients"),
        kind="flag",
        choices=(False, True),
        where="ZeRO 1 and 2 without optimizer offload, ZeRO 3",
        used_by=(
            "stage_1_and_2.DeepSpeedZeroOptimizer.setup_buckets and copy_grads_in_partition; its __init__ sets it with "
            "optimizer offload, whatever the config says. stage3._setup_for_real_optimizer allocates the bucket by it."
        ),
        applies=_contiguous_applies,
    ),
    Knob(
        name="overlap_comm",
        path=(ZERO, "overlap_comm"),
        kind="flag",
        choices=(False, True),
        where="ZeRO 1, 2, 3; not with pipeline parallelism, and on one rank ZeRO 1 and 2 with optimizer offload only",
        used_by=(
            "stage_1_and_2.DeepSpeedZeroOptimizer.process_gradients, average_tensor; "
            "stage3.reduce_and_partition_stream and DeepSpeedZeRoOffload's all-gather stream. "
            "engine._configure_zero_optimizer turns it off for pipelines. On one rank copies of gradients to the host "
            "still overlap with the backward pass, and at stage 3 partition_parameters.NoGatherHandle.wait waits for "
            "all that the stream of the gathers has to do."
        ),
        applies=_overlap_applies,
    ),
    Knob(
        name="reduce_scatter",
        path=(ZERO, "reduce_scatter"),
        kind="flag",
        choices=(False, True),
        where="ZeRO 1, 2, 3 with contiguous gradients, on several ranks",
        used_by=(
            "stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor and stage3.__reduce_and_partition_ipg_grads read it "
            "for contiguous buckets only. Stages 2 and 3 refuse it with prescale_gradients or a predivide factor. One "
            "rank has nothing to scatter, and yet a config may need its own value, as Muon does at stage 3."
        ),
        applies=_scatter_applies,
        several_ranks=True,
    ),
    Knob(
        name="reduce_bucket_size",
        path=(ZERO, "reduce_bucket_size"),
        kind="size",
        choices=_BUCKETS,
        where="ZeRO 1, 2, 3",
        used_by=(
            "stage_1_and_2.reduce_independent_p_g_buckets_and_remove_grads, stage3.reduce_independent_p_g_buckets. "
            "ZeRO 1 with bf16 and fp32 gradient accumulation runs BF16_Optimizer, which has no buckets."
        ),
        applies=_zero_reduces_gradients,
    ),
    Knob(
        name="allgather_bucket_size",
        path=(ZERO, "allgather_bucket_size"),
        kind="size",
        choices=_BUCKETS,
        where="nowhere with torch 1.13 or newer; where you list values, ZeRO 1 and 2",
        used_by=(
            "runtime.utils.all_gather_dp_groups shards by it only if the backend lacks all_gather_into_tensor, which "
            "every torch since 1.13 has (comm.torch.TorchBackend.has_all_gather_into_tensor)."
        ),
        applies=lambda params, _site: _stage(params) in (1, 2),
        inert=True,
    ),
    Knob(
        name="allgather_partitions",
        path=(ZERO, "allgather_partitions"),
        kind="flag",
        choices=(False, True),
        where="nowhere; where you list values, ZeRO 1 and 2",
        used_by="engine.DeepSpeedEngine.zero_allgather_partitions reads it, and nothing calls that.",
        applies=lambda params, _site: _stage(params) in (1, 2),
        inert=True,
    ),
    Knob(
        name="stage3_prefetch_bucket_size",
        path=(ZERO, "stage3_prefetch_bucket_size"),
        kind="size",
        choices=(5_000_000, 50_000_000, 500_000_000),
        where="ZeRO 3",
        used_by=(
            "zero.partitioned_param_coordinator.PartitionedParameterCoordinator.fetch_sub_module; "
            "stage3_allgather_sequential sets it to 1 (engine._configure_zero_optimizer)."
        ),
        applies=lambda params, site: _stage(params) == 3 and not site.sequential,
    ),
    Knob(
        name="stage3_max_live_parameters",
        path=(ZERO, "stage3_max_live_parameters"),
        kind="size",
        choices=(100_000_000, 1_000_000_000),
        where="ZeRO 3",
        used_by="PartitionedParameterCoordinator.fetch_sub_module: bounds what is prefetched.",
        applies=lambda params, _site: _stage(params) == 3 and params.get("stage3_prefetch_bucket_size", 1) > 0,
    ),
    Knob(
        name="stage3_max_reuse_distance",
        path=(ZERO, "stage3_max_reuse_distance"),
        kind="size",
        choices=(100_000_000, 1_000_000_000),
        where="ZeRO 3",
        used_by="PartitionedParameterCoordinator.__params_to_release: keeps what is used again within the distance.",
        applies=_is_stage3,
    ),
    Knob(
        name="stage3_param_persistence_threshold",
        path=(ZERO, "stage3_param_persistence_threshold"),
        kind="size",
        choices=(10_000, 100_000, 1_000_000),
        where="ZeRO 3",
        used_by="zero.parameter_offload.DeepSpeedZeRoOffload.mark_persistent_parameters.",
        applies=_is_stage3,
    ),
    Knob(
        name="sub_group_size",
        path=(ZERO, "sub_group_size"),
        kind="size",
        choices=(100_000_000, 1_000_000_000),
        where="ZeRO 3",
        used_by="stage3.DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups: elements updated at a time.",
        applies=_is_stage3,
    ),
    Knob(
        name=PARTITION_COPY,
        path=(ZERO, PARTITION_COPY),
        kind="ranks",
        choices=(1,),
        where="ZeRO 3 on several nodes, but for parameters on NVMe",
        used_by=(
            "zero.partition_parameters.Init._partition_param_sec: so many ranks, those of a node, hold a second copy "
            "of the parameters, from which they gather but once a step. Its device is that of the parameters, and "
            "there is no tensor on NVMe."
        ),
        applies=lambda params, _site: _stage(params) == 3 and params.get(OFFLOAD_PARAM) != "nvme",
        several_nodes=True,
    ),
    Knob(
        name=CHECKPOINT_EVERY,
        path=(MODEL, CHECKPOINT_EVERY),
        kind="blocks",
        choices=(0, 1, 2),
        where="models of repeated blocks whose memory is short; elsewhere where you name it",
        used_by=(
            "No key of DeepSpeed, whose section activation_checkpointing acts in scripts that call "
            "deepspeed.checkpointing: optuna_dsat.checkpoint_blocks changes the model before deepspeed.initialize."
        ),
        applies=lambda _params, site: not site.pipeline,
    ),
)
"""All knobs in the order of suggestion: a condition reads only preceding knobs."""

_MINIMUM = {"reduce_bucket_size": 1, "allgather_bucket_size": 2}
"""Smallest value that DeepSpeed accepts; 0 for the other sizes."""


NAMES: tuple[str, ...] = (*(knob.name for knob in KNOBS if knob.name != NVME), MICRO_BATCH)
"""Names of the knobs in options: the device of the optimizer's states on NVMe follows from its offload."""


def known_names() -> str:
    """Return the names of all knobs, for messages."""
    return ", ".join(NAMES)


_SHORT_NAMES: Mapping[str, str] = {"batch": MICRO_BATCH, "stage": ZERO_STAGE}
"""Short name in an option -> the knob."""


def resolve_names(names: Iterable[str], *, option: str) -> tuple[str, ...]:
    """Return the names of knobs, each once, for names as given in an option.

    Args:
        names: Knobs, by name, by key of the config (``zero_optimization.stage``) or by short name (``batch``).
        option: The option, for messages.

    Raises:
        ConfigError: If a name is not a knob; suggests the knob that it resembles.
    """
    resolved: dict[str, None] = {}
    for name in names:
        plain = name.strip().removeprefix(f"{ZERO}.")
        if plain not in NAMES and plain not in _SHORT_NAMES:
            near = near_key(plain, (*NAMES, *_SHORT_NAMES), alike=_ALIKE)
            hint = f"{near} is probably meant" if near else f"the knobs are {known_names()}"
            raise ConfigError(
                f"{option} names {name!r:.60}, which is not a knob; {hint}. batch and stage are short for the "
                "micro-batch and the ZeRO stage."
            )
        resolved[_SHORT_NAMES.get(plain, plain)] = None
    return tuple(resolved)


_ALIKE = 0.6
"""Minimum similarity of a misspelt name to a knob: short names such as ``stage`` have few letters."""


def normalise(name: str, kind: Kind, value: Any) -> Any:
    """Return a knob's value in its suggested form: ``5e8`` becomes 500000000, ``"true"`` becomes True.

    Text is read like JSON, so values from a command line can be passed unchanged.

    Raises:
        ConfigError: If the value has the wrong type or DeepSpeed would refuse it.
    """
    if kind == "device":
        return _device(name, value)
    if kind == "flag":
        flags = {True: True, False: False, "true": True, "false": False, "True": True, "False": False}
        if not isinstance(value, bool | str) or value not in flags:
            raise ConfigError(f"{name} is {as_written(value)}; it must be true or false.")
        return flags[value]
    number = 0 if kind == "blocks" and value in (None, "none") else _whole(name, value)
    if kind == "stage" and number not in ZERO_STAGES:
        raise ConfigError(f"{name} is {as_written(value)}; ZeRO stages are 0, 1, 2 and 3.")
    if kind == "ranks":
        number = number or 1  # DeepSpeed treats 0 as 1
    lowest = 1 if kind in ("count", "ranks") else _MINIMUM.get(name, 0)
    if number < lowest:
        raise ConfigError(f"{name} is {as_written(value)}; it must be at least {lowest}.")
    if name == "allgather_bucket_size" and number % 2:
        raise ConfigError(f"{name} is {as_written(value)}; DeepSpeed accepts even numbers only.")
    return number


def _device(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("device", "none")
    if value is None or value is False or value == "auto":  # accelerate and the Trainer fill in their own value
        return "none"
    if value not in ("none", "cpu", "nvme"):
        raise ConfigError(f"{name} is {as_written(value)}; it must be none, cpu or nvme.")
    return str(value)


def _whole(name: str, value: Any) -> int:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
        if number is not None and number.is_integer():
            return int(value) if isinstance(value, int) else int(number)
    except ValueError:
        pass
    raise ConfigError(f"{name} is {as_written(value)}; it must be a whole number, such as 5e8 or 500000000.")
