"""Offloaded states in host memory and on NVMe, in bytes per rank; symbols as in ``optuna_dsat.cost.zero_states``.

Sources: ZeRO-Offload (Ren et al., arXiv:2101.06840), ZeRO-Infinity (Rajbhandari et al., arXiv:2104.07857), and the
allocations and files of ``deepspeed.runtime.swap_tensor`` in DeepSpeed 0.19.8.
"""

from __future__ import annotations

from optuna_dsat.cost.zero_states import (
    FP32_BYTES,
    ZeroSettings,
    optimizer_scratch,
    second_copy,
    updated_at_once,
)


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
