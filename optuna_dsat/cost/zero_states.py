"""DeepSpeed's allocations for a model under each ZeRO stage and offload, in bytes per rank.

Symbols: P parameters, T trainable parameters, N data-parallel ranks, b bytes of a parameter (2 in fp16 and bf16,
else 4), g bytes of an accumulated gradient, R ``reduce_bucket_size`` in elements.

Sources: ZeRO (Rajbhandari et al., arXiv:1910.02054), ZeRO-Offload (Ren et al., arXiv:2101.06840),
ZeRO-Infinity (Rajbhandari et al., arXiv:2104.07857), DeepSpeed's estimators
``estimate_zero2_model_states_mem_needs`` and ``estimate_zero3_model_states_mem_needs``, Korthikanti et al.
(arXiv:2205.05198) for activations, and the allocations themselves in DeepSpeed 0.19.8, named in each
docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optuna_dsat.config import ds_config as configs
from optuna_dsat.config.structures import MAX_IN_CPU

FP32_BYTES = 4
"""Bytes of an element in fp32."""
STAGE0_REDUCE_ELEMENTS = 500_000_000
"""Elements that ZeRO 0 reduces at a time (``MEMORY_OPT_ALLREDUCE_SIZE`` of ``deepspeed.runtime.engine``), fixed."""

_OPTIMIZER_BYTES = {
    "adam": 8, "adamw": 8, "fusedadam": 8, "deepspeedcpuadam": 8, "zenflowcpuadam": 8, "onebitadam": 12,
    "zerooneadam": 12, "lamb": 8, "fusedlamb": 8, "onebitlamb": 12, "muadam": 8, "muadamw": 8, "nadam": 8, "radam": 8,
    "adamax": 8, "adagrad": 4, "deepspeedcpuadagrad": 4, "rmsprop": 4, "lion": 4, "fusedlion": 4, "deepspeedcpulion": 4,
    "muon": 4, "muonwithauxadam": 4, "adafactor": 0, "adamw8bit": 2, "adam8bit": 2, "pagedadamw8bit": 2, "lion8bit": 1,
    "rprop": 8, "asgd": 4, "adadelta": 8,
}  # fmt: skip
"""Lower-case class or config name -> bytes of state per trainable parameter, in fp32: 4 for each moment.

Adafactor keeps a row and a column per matrix, which is negligible. Muon keeps a single momentum for matrices and two
moments for the other parameters, which are few.
"""


def optimizer_bytes_per_param(config: Mapping[str, Any], profiled_optimizer: str) -> int:
    """Return optimizer bytes per trainable parameter, by the config's optimizer first; Adam's 8 if unknown."""
    section = config.get("optimizer") or {}
    name = str(section.get("type") or profiled_optimizer).lower()
    if name in ("sgd", "musgd"):
        return 0 if (section.get("params") or {}).get("momentum") in (None, 0) else 4
    return _OPTIMIZER_BYTES.get(name, 8)


def ceil_div(value: int, by: int) -> int:
    """Return a quotient, rounded up."""
    return -(-value // by)


def _smaller(first: int, second: int) -> int:
    """Return the smaller number; for arrays that of each pair."""
    return min(first, second) if isinstance(first, int) and isinstance(second, int) else np.minimum(first, second)


def _larger(first: int, second: int) -> int:
    """Return the larger number; for arrays that of each pair."""
    return max(first, second) if isinstance(first, int) and isinstance(second, int) else np.maximum(first, second)


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Inputs of the formulas, read from a profile and a DeepSpeed config.

    The sizes from ``bucket`` to ``persistence`` may also be arrays: the formulas then give arrays of bytes.
    """

    params: int
    trainable: int
    largest_layer: int
    param_bytes: int
    activation_bytes: int
    """Activation bytes per sample."""
    ranks: int
    stage: int
    mixed: bool
    """Whether parameters are fp16 or bf16, with a master copy."""
    master_bytes: int
    grad_bytes: int
    """Bytes of an accumulated gradient."""
    state_bytes: int
    """Optimizer state per trainable parameter."""
    fused_optimizer: bool
    """Whether the optimizer step needs no temporaries."""
    on_cpu: bool
    """Whether the ranks compute on the CPU."""
    accumulates: bool
    """Whether gradients outlive a backward pass (gradient accumulation above 1)."""
    offload_optimizer: str
    offload_param: str
    overlap: bool
    contiguous: bool
    reduce_scatter: bool
    bucket: int
    """R; this and the following sizes are in elements."""
    prefetch: int
    max_live: int
    max_reuse: int
    persistence: int
    sub_group: int
    nvme_buffers: int
    """Elements of the parameter swap buffers (count x size)."""
    params_in_host: int = 0
    """Parameters of a rank that stay in host memory if they are offloaded to NVMe (``max_in_cpu``)."""
    optimizer_buffers: int = 4
    """Swap buffers of the optimizer, each of a sub-group."""
    pinned: bool = True
    """Whether offloads are in page-locked host memory."""
    ratio: float = 1.0
    """Share of the optimizer that is offloaded (ZeRO 3), in whole sub-groups."""
    copy_ranks: int = 1
    """Ranks that share a second copy of the parameters (``zero_hpz_partition_size`` of ZeRO 3); 1 without a copy."""
    recomputed: float = 0.0
    """Share of the forward pass that the backward pass repeats (activation checkpointing)."""

    @property
    def partition(self) -> int:
        """Trainable parameters of a rank's partition."""
        return ceil_div(self.trainable, self.ranks)

    @property
    def host_share(self) -> float:
        """Share of the optimizer's sub-groups on the host (``stage3._create_fp32_partitions``); 0 without offload."""
        if self.offload_optimizer != "cpu" or self.ratio == 1:
            return float(self.offload_optimizer != "none")
        groups = ceil_div(self.partition, max(1, self.sub_group))
        return 1 - int((1 - self.ratio) * groups) / groups if groups else 1.0

    @property
    def param_partition(self) -> int:
        """Parameters of a rank's partition."""
        return ceil_div(self.params, self.ranks)

    @property
    def swapped_params(self) -> int:
        """Parameters of a rank on NVMe alone (``stage3._create_param_groups_fp16_flat_cpu_memory``)."""
        return max(0, self.param_partition - self.params_in_host) if self.offload_param == "nvme" else 0

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        *,
        params: int,
        trainable: int,
        largest_layer: int,
        param_bytes: int,
        activation_bytes: int,
        optimizer: str,
        ranks: int,
        on_cpu: bool,
        recomputed: float = 0.0,
    ) -> ZeroSettings:
        """Read a DeepSpeed config; ``"auto"`` means DeepSpeed's default, a list its first value."""
        plain = configs.effective(config)
        zero = plain.get(configs.ZERO, {})
        stage = int(_number(zero, "stage", 0))
        half = _half_precision(plain)
        mixed = param_bytes < FP32_BYTES if half is None else half
        elem = (2 if mixed else FP32_BYTES) if half is not None else param_bytes
        accumulation = _number(plain, configs.GRADIENT_ACCUMULATION, 1)
        grad_dtype = str((plain.get("data_types") or {}).get("grad_accum_dtype") or "")
        offload = {key: _offload_device(zero, key, stage) for key in ("offload_optimizer", "offload_param")}
        bf16, fp16 = plain.get("bf16") or {}, plain.get("fp16") or {}
        half_master = bool(bf16.get("bf16_master_weights_and_grads") or fp16.get("fp16_master_weights_and_grads"))
        state_bytes = optimizer_bytes_per_param(plain, optimizer)
        overlap = zero.get("overlap_comm")
        swap = zero.get("offload_param") or {}
        return cls(
            params=params,
            trainable=trainable,
            largest_layer=min(largest_layer, params),
            param_bytes=elem,
            activation_bytes=activation_bytes,
            ranks=ranks,
            stage=stage,
            mixed=mixed,
            master_bytes=2 if half_master else FP32_BYTES,
            grad_bytes=FP32_BYTES if grad_dtype in ("fp32", "float32", "float") else elem,
            state_bytes=state_bytes // 2 if bf16.get("bf16_optimizer_states") else state_bytes,
            fused_optimizer=_is_fused(plain, optimizer),
            on_cpu=on_cpu,
            accumulates=accumulation > 1,
            offload_optimizer=offload["offload_optimizer"],
            offload_param=offload["offload_param"],
            overlap=overlap if isinstance(overlap, bool) else stage == 3,
            contiguous=zero.get("contiguous_gradients") is not False
            or (stage in (1, 2) and offload["offload_optimizer"] != "none"),
            reduce_scatter=zero.get("reduce_scatter") is not False,
            bucket=_size(zero, "reduce_bucket_size"),
            prefetch=_size(zero, "stage3_prefetch_bucket_size"),
            max_live=_size(zero, "stage3_max_live_parameters"),
            max_reuse=_size(zero, "stage3_max_reuse_distance"),
            persistence=_size(zero, "stage3_param_persistence_threshold"),
            sub_group=_size(zero, "sub_group_size"),
            nvme_buffers=_number(swap, "buffer_count", 5) * _number(swap, "buffer_size", 100_000_000),
            params_in_host=_number(swap, "max_in_cpu", MAX_IN_CPU),
            optimizer_buffers=_number(zero.get("offload_optimizer") or {}, "buffer_count", 4),
            recomputed=recomputed,
            pinned=all((zero.get(key) or {}).get("pin_memory") is not False for key in offload),
            ratio=_share(zero.get("offload_optimizer") or {}) if stage == 3 else 1.0,
            copy_ranks=min(ranks, max(1, _size(zero, "zero_hpz_partition_size"))) if stage == 3 else 1,
        )


def _number(section: Mapping[str, Any], key: str, default: int) -> int:
    value = section.get(key, default)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def _share(offload: Mapping[str, Any]) -> float:
    value = offload.get("ratio", 1.0)
    return float(value) if isinstance(value, int | float) else 1.0


def _size(zero: Mapping[str, Any], key: str) -> int:
    return _number(zero, key, configs.zero_default(key, stage=zero.get("stage", 0)))


def _half_precision(config: Mapping[str, Any]) -> bool | None:
    """Return whether the config enables fp16 or bf16; None if it is ``"auto"``."""
    flags = [(config.get(key) or {}).get("enabled", False) for key in ("fp16", "bf16")]
    if True in flags:
        return True
    return None if configs.AUTO in flags else False


def _offload_device(zero: Mapping[str, Any], key: str, stage: int) -> str:
    device = configs.offload_device(zero.get(key))
    if stage == 0 or (key == "offload_param" and stage != 3):
        return "none"
    return "cpu" if device == "nvme" and stage != 3 else device


def _is_fused(config: Mapping[str, Any], optimizer: str) -> bool:
    """Return whether the optimizer updates in place, like DeepSpeed's FusedAdam and DeepSpeedCPUAdam.

    ``DeepSpeedEngine._configure_basic_optimizer`` builds them for ``Adam`` and ``AdamW`` unless
    ``torch_adam`` is set. An unknown optimizer counts as fused.
    """
    section = config.get("optimizer") or {}
    name = str(section.get("type") or "").lower()
    if name in ("adam", "adamw"):
        return not (section.get("params") or {}).get("torch_adam", False)
    return (name or optimizer.lower() or "fused").startswith(("fused", "deepspeedcpu", "lion"))


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a training step at which memory may peak: linear in the micro-batch."""

    name: str
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes live at any micro-batch, by kind."""
    bytes_per_sample: int = 0

    def bytes_at(self, micro_batch: int) -> int:
        """Return the bytes live at this moment."""
        return sum(self.parts.values()) + self.bytes_per_sample * micro_batch

    def plus(self, parts: Mapping[str, int]) -> Moment:
        """Return the moment with further allocations."""
        return replace(self, parts={**self.parts, **parts})


def moments(s: ZeroSettings) -> tuple[Moment, ...]:
    """Return the moments of a step at which memory may peak.

    Activations grow linearly with the micro-batch (Korthikanti et al., arXiv:2205.05198, section 4: every
    term of ``s b h (34 + 5 a s / h)`` is proportional to the micro-batch b), and are freed layer by layer
    while gradients grow, so with equal layers the peak of the backward pass is at its start or its end. At its
    start the buckets are already allocated. Known error: unequal layers, and a large logits tensor at the end,
    shift the peak by up to the size of a layer's activations.
    """
    persistent, buckets, gradients = _persistent(s), _buckets(s), _gradients(s)
    kept = gradients if s.accumulates else {}
    forward = Moment(
        name="forward",
        parts={**persistent, **buckets, **kept, **_gathered(s, at_end_of_forward=True)},
        bytes_per_sample=s.activation_bytes,
    )
    gathered = _gathered(s, at_end_of_forward=False)
    backward = Moment(name="backward", parts={**persistent, **buckets, **gradients, **_reduction(s), **gathered})
    # The buckets of stages 1 and 2 are released after the backward pass (``_release_ipg_buffers``).
    lasting = {**persistent, **buckets} if s.stage == 3 else persistent
    convert = Moment(name="convert", parts={**lasting, **_conversion(s)})
    step = Moment(name="step", parts={**lasting, **_update(s)})
    return forward, backward, convert, step


def _persistent(s: ZeroSettings) -> dict[str, int]:
    """Return the permanent allocations: parameters, master copy, optimizer state.

    ZeRO paper, section 5 (mixed-precision Adam, K = 12): 2P + 2P + 12P; P_os divides the 12 by N, P_os+g also the
    gradients, P_os+g+p everything. DeepSpeed keeps a master copy of a rank's partition in fp32 training
    as well (``DeepSpeedZeroOptimizer.__init__`` clones the partition), 4P/N that the paper does not count.
    ZeRO-3's gradient partition (``grad_partitions_flat_buffer``) is live throughout as well and counts here.
    """
    owned = s.trainable if s.stage == 0 else s.partition
    master = s.master_bytes * owned if s.mixed or s.stage > 0 else 0
    parts = {"parameters": s.param_bytes * s.params, "master": master, "optimizer": s.state_bytes * owned}
    if s.stage == 3:
        in_memory = ceil_div(s.params, s.ranks) if s.offload_param == "none" else 0
        parts["parameters"] = s.param_bytes * in_memory
        parts["gradients"] = s.grad_bytes * s.partition
        if s.copy_ranks > 1 and s.offload_param == "none":
            parts["second_copy"] = second_copy(s)
    if s.offload_optimizer != "none":
        for name in ("master", "optimizer"):
            parts[name] = round((1 - s.host_share) * parts[name])
        if s.stage == 3:
            parts["gradients"] = 0
        else:
            parts["offload_buffer"] = s.param_bytes * s.largest_layer
    return parts


def second_copy(s: ZeroSettings) -> int:
    """Return the bytes of a rank's share of the second copy of the parameters, in addition to their partition.

    ZeRO++ (Wang et al., arXiv:2306.10209, section 3.2): every k ranks hold a separate copy, b P/k each.
    ``Init._partition_param_sec`` allocates it as the forward pass releases parameters, where parameters are offloaded
    in host memory, and ``invalidate_secondary_tensor`` frees it at the end of the optimizer step.
    """
    return s.param_bytes * ceil_div(s.params, s.copy_ranks)


def _gradients(s: ZeroSettings) -> dict[str, int]:
    """Return the gradients live at the end of a backward pass.

    Stage 0 keeps all, stage 1 as well unless ``overlap_comm`` reduces them during the backward pass, stage 2
    the rank's partition (``grads_in_partition``; ZeRO paper, section 5.2), with optimizer offload none: each
    gradient is copied to the host as it is reduced (ZeRO-Offload, section 3.2). With ``grad_accum_dtype`` fp32,
    an fp32 copy is kept in addition to the bf16 gradients (``BF16_Optimizer``, or ``grad_accum`` of stage 1).
    """
    if s.stage == 3:
        return {}
    copy = s.grad_bytes if s.grad_bytes != s.param_bytes else 0
    if s.stage == 0:
        return {"gradients": s.param_bytes * s.trainable}
    early = s.overlap and s.contiguous and not s.accumulates
    if s.stage == 1 and not early:
        return {"gradients": (s.param_bytes + copy) * s.trainable}
    if s.offload_optimizer != "none":
        return {}
    return {"gradients": s.grad_bytes * s.partition}


def _buckets(s: ZeroSettings) -> dict[str, int]:
    """Return the buffers in which gradients are gathered: R elements; in stages 1 and 2 twice with overlap.

    ``DeepSpeedZeroOptimizer.setup_buckets`` and ``DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer``
    allocate all R elements, even for a small model. They are empty until written, so a CPU's resident set
    shows only the part that the model fills, while a limit on virtual memory (``RLIMIT_DATA``) and a GPU count
    all of it.
    """
    if s.stage == 0:
        return {}
    count = int(s.contiguous) + int(s.overlap) if s.stage < 3 else int(s.contiguous)
    return {"reduce_buckets": s.bucket * s.param_bytes * count}


def _reduction(s: ZeroSettings) -> dict[str, int]:
    """Return the copies that exist while a bucket is reduced.

    ``allreduce_bucket`` flattens the bucket's gradients into a new tensor; ``reduce_scatter_coalesced``
    (stage 3) does likewise. A bucket never holds more than all gradients.
    """
    if s.ranks == 1:
        return {}
    elements = _smaller(s.bucket if s.stage else STAGE0_REDUCE_ELEMENTS, s.trainable)
    return {"reduction": s.param_bytes * elements}


def _gathered(s: ZeroSettings, *, at_end_of_forward: bool) -> dict[str, int]:
    """Return the parameters that ZeRO 3 keeps gathered.

    ``PartitionedParameterCoordinator`` gathers a module (at most the largest layer; ZeRO-Infinity's
    model-state working memory, arXiv:2104.07857, section 3), prefetches ``prefetch_bucket_size`` elements
    while fewer than ``max_live_parameters`` are live, and releases parameters not used again within
    ``max_reuse_distance``: between forward and backward pass, half of this distance stays gathered, because the
    distance counts in both passes. Parameters below the persistence threshold always stay; their number is not
    profiled, so they count only if the threshold exceeds the largest layer and hence all parameters persist.
    Known error: modules are assumed to have equal sizes; a gather in flight also holds its flat copy.
    """
    if s.stage != 3:
        return {}
    prefetched = _smaller(s.prefetch, _larger(0, s.max_live - s.largest_layer))
    live = s.largest_layer + prefetched
    if at_end_of_forward:
        live = _larger(live, s.largest_layer + s.max_reuse // 2)
    live = _larger(live, s.params * (s.persistence >= s.largest_layer))
    in_flight = _larger(s.largest_layer, prefetched) if s.ranks > 1 else 0
    parts = {"gathered_parameters": s.param_bytes * _smaller(s.params, live)}
    parts["gather_in_flight"] = s.param_bytes * _smaller(s.params, in_flight)
    if not at_end_of_forward:
        parts["layer_gradients"] = s.param_bytes * s.largest_layer
    return parts


def _conversion(s: ZeroSettings) -> dict[str, int]:
    """Return the gradients live during their conversion for the optimizer.

    Stages 1 and 2 flatten the gradients of the rank's partition into a new tensor and convert it to fp32
    (``DeepSpeedZeroOptimizer.step``) as a whole, before the gradients are freed. Gradients that are already fp32 are
    not converted. DeepSpeed's estimators also count the 4 bytes of the fp32 gradients.
    """
    if s.stage in (0, 3) or s.offload_optimizer != "none":
        return {}
    fp32 = FP32_BYTES * s.partition if s.grad_bytes != FP32_BYTES else 0
    gradients = s.grad_bytes * s.partition
    return {"gradients": gradients, "flat_gradients": gradients, "fp32_gradients": fp32}


def _update(s: ZeroSettings) -> dict[str, int]:
    """Return the allocations of the optimizer step: fp32 gradients and the optimizer's temporaries.

    Stages 1 and 2 update the whole partition at once, stage 3 a sub-group (``sub_group_size``) at a time,
    stage 0 all. Stage 0 keeps the half-precision gradients and their fp32 copies. With optimizer offload
    these are in host memory, which is also the device memory of CPU ranks, except for the sub-groups on the device.
    """
    elements = updated_at_once(s)
    if s.host_share == 1:
        return {"optimizer_scratch": optimizer_scratch(s, elements)} if s.on_cpu else {}
    parts = {"fp32_gradients": FP32_BYTES * elements, "optimizer_scratch": optimizer_scratch(s, elements)}
    if s.stage == 0:
        parts["gradients"] = s.param_bytes * s.trainable
        parts["fp32_gradients"] = FP32_BYTES * s.trainable if s.mixed else 0
    return parts


def updated_at_once(s: ZeroSettings) -> int:
    """Return the elements that the optimizer updates at a time: a sub-group at ZeRO 3, else all of the rank."""
    if s.stage == 0:
        return s.trainable
    return min(s.partition, s.sub_group) if s.stage == 3 and s.sub_group else s.partition


def optimizer_scratch(s: ZeroSettings, elements: int) -> int:
    """Return the temporaries of torch's Adam: an fp32 element per parameter on CUDA, two on the CPU.

    ``torch.optim.adam._multi_tensor_adam`` (the default on CUDA) keeps the square roots of all second
    moments, ``_single_tensor_adam`` (on the CPU) square root and quotient of a single tensor, which under ZeRO is
    the whole updated part and without ZeRO at most the largest layer. DeepSpeed's optimizers need no temporaries;
    other optimizers of torch are assumed to need the same as Adam.
    """
    if s.fused_optimizer or s.state_bytes == 0:
        return 0
    if s.on_cpu or s.offload_optimizer != "none":
        return 2 * FP32_BYTES * (min(elements, s.largest_layer) if s.stage == 0 else elements)
    return FP32_BYTES * elements
