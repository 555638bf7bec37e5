"""Host memory and NVMe of a study: what launches and training need, compared with this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import NVME, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.config.ds_config import MICRO_BATCH, ZERO
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.config.structures import STRUCTURES
from optuna_dsat.cost.memory import Hardware, HostPeaks, host_peaks, swap_needs
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.nvme import Speed, check_room, measure, swap_paths
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.words import bytes_in_words, things_in_words

_SPEED_BYTES = 2**28
"""Size of the file by which a search measures the speed of NVMe."""
_DECIDING = (OFFLOAD_OPTIMIZER, NVME, OFFLOAD_PARAM, "sub_group_size")
"""Knobs that determine the memory and space of offloads to NVMe."""


def measured_nvme(spec: StudySpec) -> Speed:
    """Return the speed of a study's folder on NVMe; raise ``UsageError`` if nothing can be written there."""
    folder = Path(spec.nvme_folder or "")
    try:
        return measure(folder, size_bytes=_SPEED_BYTES)
    except OSError as error:
        raise UsageError(f"The speed of --nvme-path {folder} cannot be measured: {error.strerror}.") from None


def check_nvme(spec: StudySpec, profiled: Profiled, space: SearchSpace) -> None:
    """Check that the offloads to NVMe of a search fit on this machine.

    The folder needs space for the largest. Page-locked memory must suffice for the smallest: the search avoids
    configurations that do not fit the host.

    Raises:
        OutputError: If the folder has too little space, or the limit of page-locked memory is too low.
        UsageError: If the host has too little memory for any of them.
    """
    hardware = hardware_of(spec, profiled)
    needs: list[int] = []
    for config in _configs_on_nvme(spec, space) if spec.on == "here" else ():
        swap_bytes, locked_bytes = swap_needs(profiled.profile, config, hardware)
        for _, folder in swap_paths(config):
            check_room(Path(spec.script.cwd, folder), swap_bytes=swap_bytes, locked_bytes=locked_bytes)
        needs.append(locked_bytes * hardware.ranks_on_node)
    if needs and min(needs) > hardware.host_memory_bytes:
        raise UsageError(
            f"Offload to NVMe page-locks {bytes_in_words(min(needs))} of host memory at least, and the host has "
            f"{bytes_in_words(hardware.host_memory_bytes)}. Allow a smaller sub_group_size, or leave out --nvme-path."
        )


def _configs_on_nvme(spec: StudySpec, space: SearchSpace) -> Iterator[Mapping[str, Any]]:
    """Yield a config of the space for each of its offloads to NVMe and sizes of a sub-group."""
    seen = set()
    base = ds_config.effective(spec.ds_config)
    if spec.nvme_folder is None and not any(swap_paths(base)):
        return
    for params in space.lineages():
        key = tuple(params.get(name) for name in _DECIDING)
        if key in seen:
            continue
        seen.add(key)
        config = ds_config.merge(base, space.overlay({**params, MICRO_BATCH: space.micro_batches[0]}))
        if any(swap_paths(config)):
            yield config


def host_memory_in_words(name: str, peaks: HostPeaks, hardware: Hardware) -> tuple[str, str]:
    """Return the host memory to load, train and save the model with config ``name``, and a remedy for too little."""
    ranks = things_in_words(hardware.ranks_on_node, "rank")
    parts = [f"{bytes_in_words(peaks.loading_bytes)} to load the model if built whole by {ranks} of a host"]
    parts += [f"{bytes_in_words(peaks.step_bytes)} in steps"] if peaks.step_bytes else []
    parts += [f"{bytes_in_words(peaks.saving_bytes)} to save it"] if peaks.saving_bytes else []
    text = f"Host memory of {name}: {', '.join(parts)}. The processes themselves are not counted."
    there = hardware.host_memory_bytes
    phases = (("load", peaks.loading_bytes), ("train", peaks.step_bytes), ("save", peaks.saving_bytes))
    short = [phase for phase, size in phases if size > there]
    if not short:
        return text, ""
    remedy = f"A host has {bytes_in_words(there)}, too little to {' and to '.join(short)}."
    if "load" in short and peaks.partitioned_loading_bytes is not None:
        remedy += f" Within deepspeed.zero.Init loading takes {bytes_in_words(peaks.partitioned_loading_bytes)}."
    elif "load" in short:
        remedy += " Load on one rank after the other, or build the model on the device."
    if "save" in short and "train" not in short:
        remedy += " Without stage3_gather_16bit_weights_on_model_save each rank saves its own part."
    return text, remedy


def saving_in_words(spec: StudySpec, profiled: Profiled) -> str:
    """Return a warning if no configuration of ZeRO 3 leaves the host memory to save the model; else empty."""
    if 3 not in spec.stages:
        return ""
    hardware, base = hardware_of(spec, profiled), ds_config.effective(spec.ds_config)
    structures = [structure for structure in STRUCTURES if structure.stage == 3]
    peaks = [
        host_peaks(profiled.profile, ds_config.merge(base, {ZERO: structure.zero_section()}), hardware=hardware)
        for structure in structures
    ]
    least = min(peaks, key=lambda each: each.saving_bytes)
    there = hardware.host_memory_bytes
    if not least.step_bytes <= there < least.saving_bytes:
        return ""
    return (
        f"To save the model at ZeRO 3 takes {bytes_in_words(least.saving_bytes)} of host memory, and the host has "
        f"{bytes_in_words(there)}: a single rank collects it. Without stage3_gather_16bit_weights_on_model_save each "
        "rank saves its own part."
    )
