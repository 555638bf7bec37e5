"""Hardware, metric and search space of a study, derived from its spec and profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import ZERO_STAGE
from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.config.knobs import BIND_CORES, CHECKPOINT_EVERY, KNOBS, LEAF_MODULE, MODEL, PIN_MEMORY
from optuna_dsat.config.search_space import Role, SearchSpace
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.config.structures import STRUCTURES, Structure
from optuna_dsat.cost import memory
from optuna_dsat.errors import ConfigError
from optuna_dsat.guided.problem import REACH
from optuna_dsat.runtime.overlay import binds_cores, checkpoint_every
from optuna_dsat.study.profile.permission import permitted_knobs
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.profile.script import own_train_batch_size, user_config
from optuna_dsat.study.spec import StudySpec

LARGEST_SHARE = 10
"""Minimum steps per epoch of the largest global batch searched by default: fewer steps do not train a model."""


def dataset_size(spec: StudySpec, profiled: Profiled | None) -> int | None:
    """Return the samples of the training data, counted once if every rank loads them; None if unknown."""
    if spec.dataset_size is None and profiled is not None and profiled.loads_all:
        return profiled.samples_per_rank
    return epoch_samples(spec, profiled)


def epoch_samples(spec: StudySpec, profiled: Profiled | None) -> int | None:
    """Return the samples that all ranks consume per epoch, loaded by each rank counted for each; None if unknown."""
    if spec.dataset_size is not None:
        return spec.dataset_size
    if profiled is None or profiled.samples_per_rank is None:
        return None
    return profiled.samples_per_rank * profiled.data_parallel_size


def largest_global_batch(spec: StudySpec, profiled: Profiled | None, *, user_batch: int) -> int | None:
    """Return the upper bound of the global batch, in samples, by default at least the user's; None for none."""
    if spec.max_train_batch_size is not None:
        return spec.max_train_batch_size
    samples = dataset_size(spec, profiled)
    return None if samples is None else max(user_batch, samples // LARGEST_SHARE)


_PAGE_LOCKED = 1.5
"""Host memory of page-locked offloads relative to their content, of DeepSpeed's memory estimators."""
_LEAST_CAP = 16
"""Micro-batch up to which the memory model's estimate of model states does not limit the search."""


def hardware_of(spec: StudySpec, profiled: Profiled) -> memory.Hardware:
    """Return the hardware of a launch, as input of the memory model."""
    return memory.Hardware(
        world_size=spec.slots_per_trial,
        ranks_per_node=spec.slots_per_node,
        device_memory_bytes=profiled.profile.device_memory_bytes,
        host_memory_bytes=profiled.profile.host_memory_bytes,
        device=spec.device,
        nvme_bytes_per_s=profiled.nvme_bytes_per_s.get(spec.nvme_folder or ""),
        stages=spec.slots_per_trial // profiled.data_parallel_size if profiled.pipeline else 1,
    )


def objective(spec: StudySpec, profiled: Profiled) -> str:
    """Return the requested metric; throughput, which ranks alike, if FLOPs could not be counted."""
    if spec.metric == "FLOPS_per_gpu" and profiled.profile.flops_per_sample <= 0:
        return "throughput"
    return spec.metric


def is_memory_bound(spec: StudySpec, profiled: Profiled) -> bool:
    """Return whether memory ends the micro-batches of a search, by the memory model.

    It does if the largest that a search may reach from the user's (``REACH``) is predicted not to fit at the lowest
    stage without offload. Higher stages, offload or activation checkpointing then buy larger ones.
    """
    user, _ = user_config(spec, data_parallel_size=profiled.data_parallel_size)
    config = ds_config.merge(user, {ds_config.ZERO: Structure(stage=min(spec.stages)).zero_section()})
    largest = memory.largest_micro_batch(profiled.profile, config, hardware=hardware_of(spec, profiled))
    return bool(largest < REACH * user[MICRO_BATCH])


def searches_checkpointing(spec: StudySpec, profiled: Profiled | None) -> bool:
    """Return whether activation checkpointing is searched: if named, if memory is short, or if the script has it on.

    Raises:
        ConfigError: If it is named but impossible.
    """
    is_named = CHECKPOINT_EVERY in (*(spec.only or ()), *(spec.fix or ()))
    if CHECKPOINT_EVERY in spec.kept_knobs:
        return False
    if profiled is None:
        return is_named
    if not is_named:
        return profiled.checkpoints or (profiled.profile.blocks > 0 and is_memory_bound(spec, profiled))
    if not profiled.profile.blocks:
        reason = profiled.profile.no_checkpointing or "its profile has none (--no-profile-reuse)"
        raise ConfigError(f"{CHECKPOINT_EVERY} is given, but the model's activations cannot be checkpointed: {reason}.")
    return True


def _worthwhile(spec: StudySpec, profiled: Profiled | None) -> set[str]:
    """Return the knobs that are useful for some models only (``Knob.on_demand``), and for this one."""
    result = {CHECKPOINT_EVERY} if searches_checkpointing(spec, profiled) else set()
    if PIN_MEMORY in (spec.only or ()) or (profiled is not None and _is_host_bound(spec, profiled)):
        result.add(PIN_MEMORY)
    if routes_samples(spec, profiled):
        result.add(LEAF_MODULE)
    numa_nodes = 1 if profiled is None or spec.device == "cpu" else profiled.profile.numa_nodes
    may_gain = min(numa_nodes, spec.slots_per_node) > 1 and not binds_cores(spec.ds_config)
    if may_gain or BIND_CORES in (spec.only or ()):
        result.add(BIND_CORES)
    return result - set(spec.kept_knobs)


def routes_samples(spec: StudySpec, profiled: Profiled | None) -> bool:
    """Return whether the model has leaves for ZeRO 3 that the config lacks; ``ConfigError`` if named without any."""
    if profiled is None:
        return LEAF_MODULE in (spec.only or ())
    if LEAF_MODULE in (*(spec.only or ()), *(spec.fix or ())) and not profiled.profile.leaf_classes:
        raise ConfigError(
            f"{LEAF_MODULE} is given, but no module of the model was seen to route samples among its parts; name its "
            "class in the config: zero_optimization.leaf_module.classes."
        )
    leaves = ds_config.zero_section(spec.ds_config).get(LEAF_MODULE)
    return bool(profiled.profile.leaf_classes) and not leaves and 3 in spec.stages


def _is_host_bound(spec: StudySpec, profiled: Profiled) -> bool:
    """Return whether an offload may fit the host's memory only if it is not page-locked."""
    hardware, base = hardware_of(spec, profiled), ds_config.effective(spec.ds_config)
    if spec.device == "cpu":
        return False
    needed = [
        memory.estimate(
            profiled.profile,
            ds_config.merge(base, {ds_config.ZERO: structure.zero_section()}),
            micro_batch=1,
            hardware=hardware,
        ).host_bytes
        for structure in STRUCTURES
        if structure.stage in spec.stages and structure.offloads
    ]
    return any(size <= hardware.host_memory_bytes < _PAGE_LOCKED * size for size in needed)


def largest_micro_batches(spec: StudySpec, profiled: Profiled, *, every: int | None = None) -> dict[Structure, int]:
    """Return the largest micro-batch of each structure by the memory model, with the smallest searched buckets.

    Values are samples per rank, 0 if nothing fits. ``every`` is 0 without activation checkpointing, 1 with that of
    every block, None for the script's.
    """
    hardware = hardware_of(spec, profiled)
    base = ds_config.effective(spec.ds_config)
    every = checkpoint_every(base) if every is None else every
    space = _space(spec, profiled, cap=ds_config.MICRO_BATCH_CAP)
    sizes = {
        tuned.knob.path[1]: min(tuned.choices)
        for tuned in space.knobs
        if tuned.knob.kind == "size" and tuned.role is Role.PARAMETER
    }
    settings = memory.swap_settings(profiled.profile, base, hardware)
    structures = [structure for structure in STRUCTURES if structure.stage in spec.stages]
    if spec.nvme_folder is not None:
        structures += [structure.on_nvme() for structure in structures if structure.stage == 3 and structure.offloads]
    result = {}
    for structure in structures:
        zero = {**sizes, **structure.zero_section(nvme_path=spec.nvme_folder, swap_settings=settings)}
        config = ds_config.merge(base, {ds_config.ZERO: zero, MODEL: {CHECKPOINT_EVERY: every}})
        result[structure] = memory.largest_micro_batch(profiled.profile, config, hardware=hardware)
    return result


def micro_batch_cap(spec: StudySpec, profiled: Profiled) -> int:
    """Return the upper bound of the micro-batch: twice the largest micro-batch of the most memory-efficient config.

    The factor of two allows for errors of the memory model. If the predicted bound is very small, the error in the
    model states dominates: the bound is then at least the micro-batch that fits without states, up to ``_LEAST_CAP``.
    """
    every = 1 if searches_checkpointing(spec, profiled) else 0
    best = max(1, *largest_micro_batches(spec, profiled, every=every).values())
    alone = hardware_of(spec, profiled).device_memory_bytes // max(1, profiled.profile.activation_bytes(every))
    wanted = max(2, min(_LEAST_CAP, alone), int(2 * best * spec.options.search_range_factor))
    limit = ds_config.parse_autotuning(spec.ds_config).max_train_micro_batch_size_per_gpu or ds_config.MICRO_BATCH_CAP
    return min(wanted, limit, profiled.samples_per_rank or limit, ds_config.MICRO_BATCH_CAP)


def _max_samples_per_rank(spec: StudySpec, profiled: Profiled | None, ranks: int) -> int | None:
    """Return the limit on samples per rank and step by ``--max-train-batch-size`` and autotuning; None for no limit."""
    if spec.train_batch_size is not None:
        return None
    user_batch = own_train_batch_size(spec, ranks=ranks)
    limits = {
        "--max-train-batch-size": largest_global_batch(spec, profiled, user_batch=user_batch),
        "autotuning.max_train_batch_size": ds_config.parse_autotuning(spec.ds_config).max_train_batch_size,
    }
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return None
    name = min(known, key=lambda name: known[name])
    if known[name] < ranks:
        raise ConfigError(f"{name} is {known[name]}, less than one sample for each of {ranks} data-parallel ranks.")
    return known[name] // ranks


def user_samples_per_rank(spec: StudySpec, profiled: Profiled) -> int | None:
    """Return the samples per rank and step of the user's config; None if no further trials are to have that batch."""
    ranks = profiled.data_parallel_size
    batch, most = own_train_batch_size(spec, ranks=ranks), _max_samples_per_rank(spec, profiled, ranks)
    is_searched = spec.train_batch_size is None and batch % ranks == 0 and (most is None or batch <= most * ranks)
    return batch // ranks if is_searched else None


def space_of(spec: StudySpec, profiled: Profiled | None) -> SearchSpace:
    """Return the search space; before the profile launch it is not yet capped by the model's size.

    Raises:
        ConfigError: If the config, ``fix`` or ``no_tune`` contain an unknown knob or an invalid value, or ``only``
            leaves nothing to search.
    """
    cap = ds_config.MICRO_BATCH_CAP if profiled is None else micro_batch_cap(spec, profiled)
    space = _space(spec, profiled, cap=cap)
    if spec.only:
        _check_only(spec, space, is_profiled=profiled is not None)
    return space


def _check_only(spec: StudySpec, space: SearchSpace, *, is_profiled: bool) -> None:
    """Raise if ``only`` names a knob without effect (once known), or excludes one with a list of values."""
    zero = ds_config.zero_section(spec.ds_config)
    settings = {**zero, MICRO_BATCH: spec.ds_config.get(MICRO_BATCH), ZERO_STAGE: zero.get("stage")}
    for name in spec.kept_knobs:
        value = settings.get(name)
        if isinstance(value.get("device") if isinstance(value, Mapping) else value, list):
            raise ConfigError(
                f"The config lists values of {name}, which --only excludes: add --only {name}, or drop one."
            )
    if not (is_profiled or spec.script.config_path):
        return
    searched = {row.knob: row.choices for row in space.describe() if row.role == Role.PARAMETER}
    for name in spec.only or ():
        if name not in searched:
            where = next(knob.where for knob in KNOBS if knob.name == name)
            raise ConfigError(
                f"--only names {name}, which has no effect in any configuration of this search. It has one with: "
                f"{where}. Add --only stage, or drop it."
            )
    if all(len(set(searched[name])) == 1 for name in spec.only or ()):
        raise ConfigError(
            "--only leaves nothing to search: "
            + ", ".join(f"{name} can only be {searched[name][0]}" for name in spec.only or ())
            + "."
        )


def _space(spec: StudySpec, profiled: Profiled | None, *, cap: int) -> SearchSpace:
    ranks = spec.data_parallel_ranks if profiled is None else profiled.data_parallel_size
    config: Mapping[str, Any] = spec.ds_config
    if MICRO_BATCH in spec.kept_knobs:  # a config may give it by its global batch only
        user, _ = user_config(spec, data_parallel_size=ranks)
        config = {**config, MICRO_BATCH: user[MICRO_BATCH]}
    request = SpaceRequest(
        ds_config=config,
        zero_stages=spec.stages,
        fix=spec.fix or {},
        no_tune=spec.kept_knobs,
        nvme_path=spec.nvme_folder,
        params=None if profiled is None else profiled.profile.params,
        micro_batch_cap=cap,
        pipeline=profiled is not None and profiled.pipeline,
        untested_optimizer=(
            profiled.profile.optimizer if profiled is not None and profiled.zero_is_untested(spec) else ""
        ),
        allow_untested_optimizer=profiled is not None and profiled.zero_was_compared(spec),
        device=spec.device,
        gradient_accumulation_steps=ds_config.batch_triangle(
            ds_config.effective(spec.ds_config),
            world_size=ranks,
        ).gradient_accumulation_steps,
        holds_accumulation=profiled is not None and profiled.holds_accumulation,
        samples_per_rank=None if spec.train_batch_size is None else spec.train_batch_size // ranks,
        max_samples_per_rank=_max_samples_per_rank(spec, profiled, ranks),
        divisible_by=spec.divisible_by,
        least_micro_batch=1 if profiled is None else profiled.least_micro_batch,
        nodes=spec.nodes_per_trial,
        ranks_per_node=spec.slots_per_node,
        trainable=None if profiled is None else profiled.profile.trainable_params,
        largest_layer=None if profiled is None else profiled.profile.largest_layer_params,
        leaf_classes=() if profiled is None else profiled.profile.leaf_classes,
        worthwhile=_worthwhile(spec, profiled),
        permitted=permitted_knobs(spec, profiled),
    )
    return build_space(request)
