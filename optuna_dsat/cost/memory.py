"""Memory model: bytes per rank and per host for a profile and a DeepSpeed config, and the largest micro-batch.

A training step has four moments at which memory peaks: the end of the forward pass (all activations live), the end of
the backward pass (all gradients live), their conversion for the optimizer, and its step (its temporaries live). Each
is linear in the micro-batch, the estimate is their maximum, and the largest micro-batch has a closed form. The time of
each allocation was read in DeepSpeed 0.19.8 and checked on two CPU ranks, where predictions agree with the resident
set within 3% (the figures are in ``tests/cost/test_memory.py``); :mod:`optuna_dsat.cost.zero_states` contains the
formulas and their sources. Under a limit on virtual memory (``RLIMIT_DATA``) buffers that are allocated but not
written count as well; the model always counts them.

Known limitations: model and expert parallelism are not modelled (the profile's parameter counts are assumed to be per
rank). The CUDA context (0.3 to 0.6 GiB), NCCL's buffers (0.1 to 1 GiB) and fragmentation of the caching allocator (a
few per cent) are not modelled either; ``torch.cuda.max_memory_allocated`` does not count them.
:mod:`optuna_dsat.cost.memory_posterior` corrects the error shown by measured peaks.

Offloaded states: ZeRO-Offload (Ren et al., arXiv:2101.06840), ZeRO-Infinity (Rajbhandari et al., arXiv:2104.07857), and
the allocations and files of ``deepspeed.runtime.swap_tensor`` in DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from optuna_dsat.config import ds_config as configs
from optuna_dsat.config.knobs import LEAF_MODULE
from optuna_dsat.config.record import Record
from optuna_dsat.config.structures import param_swap_settings
from optuna_dsat.cost.zero_states import (
    FP32_BYTES,
    Moment,
    ZeroSettings,
    moments,
    optimizer_scratch,
    second_copy,
    updated_at_once,
)
from optuna_dsat.runtime.events import ModelFacts
from optuna_dsat.runtime.overlay import checkpoint_every

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelProfile(ModelFacts, Record):
    """Model and hardware as measured by the profile launch, or derived from a model's shape."""

    def __post_init__(self) -> None:
        if not 0 <= self.trainable_params <= self.params:
            raise ValueError(f"trainable_params is {self.trainable_params}; it must lie in 0..{self.params} (params).")
        if self.param_bytes not in (1, 2, 4, 8):
            raise ValueError(f"param_bytes is {self.param_bytes}; an element has 1, 2, 4 or 8 bytes.")
        if self.activation_bytes_per_sample < 0:
            raise ValueError(f"activation_bytes_per_sample is {self.activation_bytes_per_sample}; it must be >= 0.")

    def checkpointed_share(self, every: int) -> float:
        """Return the share of the blocks that are checkpointed if every so many are; 0 for none."""
        return -(-self.blocks // every) / self.blocks if every and self.blocks else 0.0

    def activation_bytes(self, every: int) -> int:
        """Return the activations per sample at the peak of a step with every so many blocks checkpointed.

        Of a checkpointed block its inputs stay, and of one at a time all activations, which the backward pass computes
        again (Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198, section 5). Known error: blocks are
        assumed to be alike.
        """
        share = self.checkpointed_share(every)
        if not share:
            return self.activation_bytes_per_sample
        inputs = min(self.block_input_bytes_per_sample, self.block_bytes_per_sample)
        kept = self.block_bytes_per_sample - share * (self.block_bytes_per_sample - inputs)
        again = (self.block_bytes_per_sample - inputs) / self.blocks
        outside = self.activation_bytes_per_sample - self.block_bytes_per_sample
        return min(self.activation_bytes_per_sample, max(0, round(outside + kept + again)))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Where a launch runs."""

    world_size: int
    ranks_per_node: int
    device_memory_bytes: int
    """Memory that a rank may use on its device."""
    host_memory_bytes: int
    """Memory of a host, shared by its ranks."""
    device: str = "cuda"
    """``cuda`` or ``cpu``; on ``cpu``, offloaded states stay in the rank's own memory and save nothing."""
    nvme_bytes_per_s: float | None = None
    """Measured speed of a host's NVMe, the mean of reading and writing the same bytes; None if unknown."""
    stages: int = 1
    """Stages of a pipeline: ZeRO partitions each of them among the ranks that have it."""

    @property
    def partitions(self) -> int:
        """Ranks among which ZeRO partitions a parameter's states."""
        return max(1, self.world_size // self.stages)

    @property
    def ranks_on_node(self) -> int:
        """Ranks per host."""
        return min(self.ranks_per_node, self.world_size)

    @property
    def nodes(self) -> int:
        """Hosts over which the ranks are spread."""
        return -(-self.world_size // self.ranks_on_node)

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"world_size is {self.world_size}, ranks_per_node {self.ranks_per_node}; both must be at least 1."
            )


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Predicted peak of a configuration."""

    device_bytes: int
    """Peak of a rank's device; the sum of ``parts``."""
    host_bytes: int
    """Offloaded bytes on a host, summed over its ranks; on CPU all bytes that its ranks use."""
    parts: Mapping[str, int]
    """Bytes live at the moment of the peak, by kind."""
    moment: str = ""
    """Moment of the peak: ``forward``, ``backward``, ``convert`` or ``step``."""


def estimate(profile: ModelProfile, ds_config: Config, *, micro_batch: int, hardware: Hardware) -> MemoryEstimate:
    """Predict the peak memory of a step; of the config's batch sizes only gradient accumulation is read.

    Raises:
        ValueError: If the micro-batch is negative.
    """
    if micro_batch < 0:
        raise ValueError(f"micro_batch is {micro_batch}; it must not be negative.")
    candidates = rank_moments(profile, ds_config, hardware)
    peak = max(candidates, key=lambda moment: moment.bytes_at(micro_batch))
    parts = {**peak.parts, "activations": peak.bytes_per_sample * micro_batch}
    offloaded = sum(rank_host_parts(zero_settings(profile, ds_config, hardware)).values())
    device_bytes = peak.bytes_at(micro_batch)
    per_rank = device_bytes if hardware.device == "cpu" else offloaded
    return MemoryEstimate(
        device_bytes=device_bytes,
        host_bytes=per_rank * hardware.ranks_on_node,
        parts=MappingProxyType({name: size for name, size in parts.items() if size}),
        moment=peak.name,
    )


@dataclass(frozen=True, kw_only=True)
class HostPeaks:
    """Predicted peaks of the host memory that the model takes on one host, by phase of a training."""

    loading_bytes: int
    """While each rank builds the whole model before ``deepspeed.initialize``."""
    partitioned_loading_bytes: int | None
    """The same if the model is built within ``deepspeed.zero.Init``: its largest layer on each rank, and the offloaded
    partitions. None below ZeRO 3.
    """
    step_bytes: int
    saving_bytes: int
    """While the first rank collects the whole model to save it: with ``stage3_gather_16bit_weights_on_model_save``
    (``engine._zero3_consolidated_16bit_state_dict``), else as in steps.
    """


def host_peaks(profile: ModelProfile, ds_config: Config, *, hardware: Hardware) -> HostPeaks:
    """Predict the host memory of GPU ranks by phase.

    The optimizer of an offload is allocated after the model was moved to the device. Known error: the processes
    themselves (1 to 3 GiB each with torch and CUDA), the page cache, and a second copy of the weights where a script
    reads a whole checkpoint before it fills the model, are not counted.
    """
    zero = configs.zero_section(ds_config)
    whole = profile.params * profile.param_bytes
    steps = estimate(profile, ds_config, micro_batch=1, hardware=hardware).host_bytes
    layer = profile.largest_layer_params * profile.param_bytes
    partitions = whole // hardware.world_size if (zero.get("offload_param") or {}).get("device") == "cpu" else 0
    collects = zero.get("stage") == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is True
    return HostPeaks(
        loading_bytes=hardware.ranks_on_node * whole,
        partitioned_loading_bytes=hardware.ranks_on_node * (layer + partitions) if zero.get("stage") == 3 else None,
        step_bytes=steps,
        saving_bytes=steps + (whole if collects else 0),
    )


def largest_micro_batch(profile: ModelProfile, ds_config: Config, *, hardware: Hardware) -> int:
    """Return the largest micro-batch predicted to fit, at most ``MICRO_BATCH_CAP``; 0 if not even 1 fits.

    Every moment is ``intercept + slope * micro_batch``, so the answer is the smallest of ``floor((limit -
    intercept) / slope)`` over the moments, with ``limit`` the device's memory. The config's batch sizes are ignored.
    """
    limit = hardware.device_memory_bytes
    if hardware.device == "cpu":
        limit = min(limit, hardware.host_memory_bytes // hardware.ranks_on_node)
    elif estimate(profile, ds_config, micro_batch=1, hardware=hardware).host_bytes > hardware.host_memory_bytes:
        return 0
    answer = configs.MICRO_BATCH_CAP
    for moment in rank_moments(profile, ds_config, hardware):
        room = limit - moment.bytes_at(0)
        if room < 0:
            return 0
        if moment.bytes_per_sample > 0:
            answer = min(answer, room // moment.bytes_per_sample)
    return answer


def swap_settings(profile: ModelProfile, ds_config: Config, hardware: Hardware) -> dict[str, int]:
    """Return the settings with which a search offloads the parameters to NVMe."""
    return param_swap_settings(
        configs.zero_section(ds_config),
        params=profile.params,
        largest_layer=profile.largest_layer_params,
        ranks=hardware.world_size,
    )


def swap_needs(profile: ModelProfile, ds_config: Config, hardware: Hardware) -> tuple[int, int]:
    """Return the bytes that the ranks of a host write to NVMe, and the bytes that each rank page-locks for it."""
    settings = zero_settings(profile, ds_config, hardware)
    return hardware.ranks_on_node * sum(rank_swap_parts(settings).values()), locked_bytes(settings)


def zero_settings(profile: ModelProfile, ds_config: Config, hardware: Hardware) -> ZeroSettings:
    """Return the inputs of the allocation formulas for a profile, a DeepSpeed config and the hardware."""
    zero = configs.zero_section(ds_config)
    leaf = profile.leaf_params if zero.get("stage") == 3 and zero.get(LEAF_MODULE) else 0
    every = checkpoint_every(ds_config)
    is_halved = profile.param_bytes == 4 and configs.precision_of(ds_config) != "fp32"  # measured in fp32
    return ZeroSettings.of(
        ds_config,
        params=profile.params,
        trainable=profile.trainable_params,
        largest_layer=max(profile.largest_layer_params, leaf),
        param_bytes=profile.param_bytes,
        activation_bytes=profile.activation_bytes(every) // (2 if is_halved else 1),
        recomputed=profile.checkpointed_share(every) * profile.block_share,
        optimizer=profile.optimizer,
        ranks=hardware.partitions,
        on_cpu=hardware.device == "cpu",
    )


def rank_moments(profile: ModelProfile, ds_config: Config, hardware: Hardware) -> tuple[Moment, ...]:
    """Return the moments at which a rank's memory may peak; on CPU with the offloaded states, which stay in it."""
    settings = zero_settings(profile, ds_config, hardware)
    result = moments(settings)
    if hardware.device == "cpu":
        offloaded = rank_host_parts(settings)
        return tuple(moment.plus({f"offloaded_{name}": size for name, size in offloaded.items()}) for moment in result)
    return tuple(result)


def rank_host_parts(s: ZeroSettings) -> dict[str, int]:
    """Return the bytes that a rank keeps in host memory, by kind.

    Optimizer offload (ZeRO-Offload, arXiv:2101.06840, section 3): master, optimizer state, fp32 gradients and
    a half-precision copy of the partition, (4 + k + 4 + b) T/N, and the temporaries of an optimizer of torch.
    Stages 1 and 2 add a gradient of the largest parameter and, under gradient accumulation, the accumulated
    partition; stage 3 the gradient partition, and a part of its sub-groups may stay on the device (ZeRO-Offload++,
    DeepSpeed pull request 4636). With NVMe (ZeRO-Infinity) only the swap buffers stay, each of a sub-group.
    Parameter offload: b P/N, with NVMe the swap buffers and the parameters that stay (``max_in_cpu``), and the second
    copy, if any. DeepSpeed's estimators multiply by 1.5, because the CUDA host allocator rounds pinned blocks up to
    powers of two; that factor is not included.
    """
    parts: dict[str, int] = {}
    if s.offload_optimizer != "none":
        states = round((s.master_bytes + s.state_bytes + FP32_BYTES) * s.partition * s.host_share)
        parts["optimizer"] = _optimizer_buffers(s) if s.offload_optimizer == "nvme" else states
        parts["optimizer_scratch"] = 0 if s.on_cpu else optimizer_scratch(s, updated_at_once(s))
        if s.stage == 3:
            parts["gradients"] = s.grad_bytes * s.partition
        else:
            parts["parameter_copy"] = s.param_bytes * s.partition
            parts["gradients"] = s.param_bytes * (s.largest_layer + (s.partition if s.accumulates else 0))
    if s.offload_param == "cpu":
        parts["parameters"] = s.param_bytes * s.param_partition
    elif s.offload_param == "nvme":
        parts["parameters"] = _param_buffers(s) + s.param_bytes * (s.param_partition - s.swapped_params)
    if s.offload_param != "none" and s.copy_ranks > 1:
        parts["second_copy"] = second_copy(s)
    return parts


def _optimizer_buffers(s: ZeroSettings) -> int:
    """Return the bytes of a rank's swap buffers of the optimizer (``swap_tensor.utils.SwapBufferManager``)."""
    return s.optimizer_buffers * s.master_bytes * updated_at_once(s)


def _param_buffers(s: ZeroSettings) -> int:
    """Return the bytes of a rank's swap buffers of parameters, and of the sub-group that is written after an update.

    ``AsyncPartitionedParameterSwapper._configure_aio`` and ``reserve_partitioned_swap_space``.
    """
    return s.param_bytes * (s.nvme_buffers + (updated_at_once(s) if s.swapped_params else 0))


def rank_swap_parts(s: ZeroSettings) -> dict[str, int]:
    """Return the bytes that a rank writes to NVMe, by kind: files that stay as long as the engine.

    The optimizer's files are master copy, states and gradients in the master's type
    (``OptimizerSwapper._swap_out_gradients``). DeepSpeed writes all parameters before it decides which of them stay in
    host memory. Known error: tensors below 1 MiB are not written.
    """
    parts: dict[str, int] = {}
    if s.offload_optimizer == "nvme":
        parts["optimizer"] = (2 * s.master_bytes + s.state_bytes) * s.partition
    if s.offload_param == "nvme":
        parts["parameters"] = s.param_bytes * s.param_partition
    return parts


def locked_bytes(s: ZeroSettings) -> int:
    """Return the bytes of a rank's swap buffers, which DeepSpeed page-locks (``ds_page_aligned_alloc``)."""
    optimizer = _optimizer_buffers(s) if s.offload_optimizer == "nvme" else 0
    return optimizer + (_param_buffers(s) if s.offload_param == "nvme" else 0)
