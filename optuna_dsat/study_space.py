"""Hardware and search space of one study: what follows from its spec and profile."""

from __future__ import annotations

from optuna_dsat import ds_config, memory
from optuna_dsat.profiling import Profiled
from optuna_dsat.space import SearchSpace, build_space
from optuna_dsat.spec import StudySpec

__all__ = ["hardware_of", "micro_batch_cap", "space_of"]

_MAX_MICRO_BATCH = 2**16
"""No micro-batch beyond this is tried, whatever the memory model says."""


def hardware_of(spec: StudySpec, profiled: Profiled) -> memory.Hardware:
    """Return the hardware of one launch as the memory model wants it."""
    return memory.Hardware(
        world_size=spec.slots_per_trial,
        ranks_per_node=spec.slots_per_trial,
        device_memory_bytes=profiled.profile.device_memory_bytes,
        host_memory_bytes=profiled.profile.host_memory_bytes,
        device=spec.device,
    )


def micro_batch_cap(spec: StudySpec, profiled: Profiled) -> int:
    """Return the upper end of the micro-batch's distribution: twice what the most frugal configuration can hold.

    The memory model errs; the factor two leaves room to find out.
    """
    hardware = hardware_of(spec, profiled)
    base = ds_config.effective(spec.ds_config)
    best = 1
    for stage in spec.zero_stages:
        for offload in (None, {"device": "cpu"}) if stage > 0 else (None,):
            zero = {
                "stage": stage,
                "offload_optimizer": offload,
                "offload_param": offload if stage == 3 else None,
            }
            config = ds_config.merge(base, {"zero_optimization": zero})
            best = max(best, memory.largest_micro_batch(profiled.profile, config, hardware=hardware))
    wanted = max(2, int(2 * best * spec.options.search_range_factor))
    limit = ds_config.parse_autotuning(spec.ds_config).max_train_micro_batch_size_per_gpu or _MAX_MICRO_BATCH
    return min(wanted, limit, _MAX_MICRO_BATCH)


def space_of(spec: StudySpec, profiled: Profiled | None) -> SearchSpace:
    """Return the search space; before the profile launch it is not yet capped by the model's size."""
    return build_space(
        spec.ds_config,
        zero_stages=spec.zero_stages,
        fix=spec.fix,
        no_tune=spec.no_tune,
        nvme_path=spec.nvme_path,
        params=None if profiled is None else profiled.profile.params,
        micro_batch_cap=_MAX_MICRO_BATCH if profiled is None else micro_batch_cap(spec, profiled),
        pipeline=profiled is not None and profiled.pipeline,
        device=spec.device,
        gradient_accumulation_steps=ds_config.batch_triangle(
            ds_config.effective(spec.ds_config),
            world_size=(profiled and profiled.data_parallel_size) or spec.slots_per_trial,
        ).gradient_accumulation_steps,
    )
