"""What each ZeRO stage and offload promises before anything is searched: memory, time, and what bounds it.

Memory is that of ``optuna_dsat.cost.memory``; what torch's allocator does not count (context, libraries, gaps) is
left free, as ``optuna_dsat.cost.memory_posterior`` has it. Times are those of ``optuna_dsat.cost.step_time`` with
coefficients by the GPU's data sheet, or learnt from launches of the same model; their uncertainty is what these leave
open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from optuna_dsat.config import ds_config
from optuna_dsat.config.structures import STRUCTURES, Structure
from optuna_dsat.cost.gpus import Priors
from optuna_dsat.cost.memory import Hardware, ModelProfile, estimate, largest_micro_batch
from optuna_dsat.cost.memory_posterior import MemoryPosterior
from optuna_dsat.cost.step_time import Columns, Fitted, StepTimeModel
from optuna_dsat.cost.zero_states import ZeroSettings

__all__ = ["Outlook", "PlannedRow", "Subject", "plan_rows", "theory_of"]

_SIZES = 40
"""Micro-batches at which the predicted throughput is compared."""
_INTERVAL = 1.645
"""Standard deviations on either side that hold nine cases of ten."""
_FORMULA_ERROR = 0.1
"""Relative error of the step formula itself, whatever its coefficients."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned for."""

    profile: ModelProfile
    hardware: Hardware
    config: Mapping[str, Any]
    """The user's DeepSpeed config, or what stands for it."""
    machine: Priors = field(default_factory=dict)
    """What is known of the machine's speed."""
    learnt: Fitted | None = None
    """Coefficients of the step theory that launches taught, where there were any."""
    memory_margin: float = 0.05
    """Share of the device's memory to leave free."""
    pipeline: bool = False

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator can be expected to get on one device."""
        device = self.hardware.device_memory_bytes
        on_cpu = self.hardware.device == "cpu"
        if on_cpu:
            ranks = min(self.hardware.ranks_per_node, self.hardware.world_size)
            device = min(device, self.hardware.host_memory_bytes // ranks)
        posterior = MemoryPosterior(device_bytes=device, bytes_per_sample=0, on_cpu=on_cpu)
        return math.floor(max(1.0, min(posterior.usable, (1 - self.memory_margin) * device)))


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The predicted step of one configuration."""

    step_s: float
    """Median of one optimizer step, in seconds."""
    low_s: float
    high_s: float
    """Nine steps of ten are expected between the two."""
    samples_per_s: float
    """Over all ranks, at the median."""
    shares: Mapping[str, float]
    """compute, link, host, memory, overhead -> share of the step that each costs."""

    @property
    def bound(self) -> str:
        """What most of the step is spent on."""
        return max(self.shares, key=lambda name: self.shares[name])


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """One ZeRO stage with its offloads."""

    structure: Structure
    config: Mapping[str, Any]
    """The user's config with this stage and offload, without micro-batch."""
    states_bytes: int
    """Per device at the peak, without a single sample."""
    least_bytes: int
    """Per device at the peak, at micro-batch 1."""
    largest: int
    """Largest micro-batch that fits; 0 where not even 1 does."""
    micro_batch: int
    """The one with the best predicted throughput; 0 where none fits."""
    device_bytes: int
    """Per device at the peak, at ``micro_batch`` (at 1 where none fits)."""
    host_bytes: int
    parts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Of ``device_bytes``."""
    outlook: Outlook | None
    """None where nothing fits."""
    why_not: str = ""
    """``device`` or ``host``: whose memory is too small."""

    @property
    def name(self) -> str:
        """The structure in words."""
        return self.structure.words

    @property
    def bound(self) -> str:
        """What bounds it."""
        return self.outlook.bound if self.outlook is not None else "memory"

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        outlook = self.outlook
        return {
            "name": self.name,
            "zero_optimization": dict(self.config.get("zero_optimization", {})),
            "device_bytes_without_samples": self.states_bytes,
            "device_bytes_at_micro_batch_1": self.least_bytes,
            "largest_micro_batch": self.largest,
            "micro_batch": self.micro_batch,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "parts": dict(self.parts),
            "step_s": None if outlook is None else outlook.step_s,
            "step_s_90": None if outlook is None else [outlook.low_s, outlook.high_s],
            "samples_per_s": None if outlook is None else outlook.samples_per_s,
            "bound": self.bound,
            "shares": None if outlook is None else dict(outlook.shares),
            "too_small": self.why_not or None,
        }


def plan_rows(subject: Subject) -> list[PlannedRow]:
    """Return a row for each stage and offload that the hardware knows."""
    return [_row(subject, structure) for structure in _structures(subject)]


def _structures(subject: Subject) -> Iterator[Structure]:
    """Yield what DeepSpeed accepts: a pipeline at most at ZeRO 1, nothing to offload where ranks run on the CPU."""
    for structure in STRUCTURES:
        if (structure.stage <= 1 or not subject.pipeline) and not (
            structure.offloads and subject.hardware.device == "cpu"
        ):
            yield structure


def _config(subject: Subject, structure: Structure) -> dict[str, Any]:
    """Return the user's config at a structure, without batch sizes; what it says of an offload besides is kept."""
    base = ds_config.effective(subject.config)
    own = base.get("zero_optimization") or {}
    zero = structure.zero_section()
    for key in ("offload_optimizer", "offload_param"):
        if zero[key] is not None:
            kept = own.get(key)
            zero[key] = {"pin_memory": True, **(kept if isinstance(kept, Mapping) else {}), **zero[key]}
    batch = {"train_batch_size": None, "train_micro_batch_size_per_gpu": None}
    return ds_config.merge(base, {**batch, "zero_optimization": zero})


def _row(subject: Subject, structure: Structure) -> PlannedRow:
    config = _config(subject, structure)
    profile, hardware = subject.profile, subject.hardware
    cap = Hardware(
        world_size=hardware.world_size,
        ranks_per_node=hardware.ranks_per_node,
        device_memory_bytes=subject.usable_bytes,
        host_memory_bytes=hardware.host_memory_bytes,
        device=hardware.device,
    )
    largest = largest_micro_batch(profile, config, hardware=cap)
    states = estimate(profile, config, micro_batch=0, hardware=hardware)
    least = estimate(profile, config, micro_batch=1, hardware=hardware)
    sizes = _sizes(largest)
    outlooks = look_ahead(subject, [config] * len(sizes), sizes)
    best = max(range(len(sizes)), key=lambda index: outlooks[index].samples_per_s, default=None)
    at = least if best is None else estimate(profile, config, micro_batch=sizes[best], hardware=hardware)
    too_small = "host" if least.host_bytes > hardware.host_memory_bytes else "device"
    return PlannedRow(
        structure=structure,
        config=MappingProxyType(config),
        states_bytes=states.device_bytes,
        least_bytes=least.device_bytes,
        largest=largest,
        micro_batch=0 if best is None else sizes[best],
        device_bytes=at.device_bytes,
        host_bytes=at.host_bytes,
        parts=at.parts,
        outlook=None if best is None else outlooks[best],
        why_not="" if largest else too_small,
    )


def _sizes(largest: int) -> list[int]:
    """Return micro-batches up to the largest, close together near it."""
    if largest < 1:
        return []
    spread = np.geomspace(1, largest, min(largest, _SIZES))
    return sorted({round(size) for size in spread})


def theory_of(subject: Subject) -> StepTimeModel:
    """Return the step theory with all that is known beforehand."""
    profile, hardware = subject.profile, subject.hardware
    return StepTimeModel(
        params=profile.params,
        trainable=profile.trainable_params,
        largest_layer=profile.largest_layer_params,
        param_bytes=profile.param_bytes,
        flops_per_sample=profile.flops_per_sample,
        ranks=hardware.world_size,
        ranks_per_node=min(hardware.ranks_per_node, hardware.world_size),
        machine=subject.machine,
        prior=subject.learnt,
    )


def look_ahead(subject: Subject, configs: Sequence[Mapping[str, Any]], micro_batches: Sequence[int]) -> list[Outlook]:
    """Return the predicted steps of configs at micro-batches.

    Args:
        subject: Model and machine.
        configs: Whole DeepSpeed configs; their own micro-batches are ignored.
        micro_batches: Samples per rank and forward pass, one for each config.
    """
    if not configs:
        return []
    step_time = theory_of(subject)
    fitted = step_time.before()
    columns = Columns.of(*zip(*[_settings(subject, config) for config in configs], strict=True))
    size = np.array(micro_batches, dtype=np.float64)
    steps = np.array([int(config.get(ds_config.GRADIENT_ACCUMULATION) or 1) for config in configs], dtype=np.float64)
    peaks = [
        estimate(subject.profile, config, micro_batch=each, hardware=subject.hardware).device_bytes
        for config, each in zip(configs, micro_batches, strict=True)
    ]
    fill = np.clip(np.array(peaks) / subject.hardware.device_memory_bytes, 0.01, 1.0)
    phases, slopes = step_time.slopes(fitted, columns, size, steps, fill)
    total = phases.sum(axis=0)
    relative = slopes.sum(axis=0) / total
    spread = np.sqrt(np.einsum("kn,kl,ln->n", relative, fitted.covariance, relative) + _FORMULA_ERROR**2)
    bounds = step_time.bounds(fitted.mean, columns, size, steps, fill)
    shown = np.sum(list(bounds.values()), axis=0)
    return [
        Outlook(
            step_s=float(total[n]),
            low_s=float(total[n] * math.exp(-_INTERVAL * spread[n])),
            high_s=float(total[n] * math.exp(_INTERVAL * spread[n])),
            samples_per_s=float(size[n] * steps[n] * subject.hardware.world_size / total[n]),
            shares=MappingProxyType({name: float(seconds[n] / shown[n]) for name, seconds in bounds.items()}),
        )
        for n in range(len(total))
    ]


def _settings(subject: Subject, config: Mapping[str, Any]) -> tuple[ZeroSettings, bool]:
    profile = subject.profile
    settings = ZeroSettings.of(
        config,
        params=profile.params,
        trainable=profile.trainable_params,
        largest_layer=profile.largest_layer_params,
        param_bytes=profile.param_bytes,
        activation_bytes=profile.activation_bytes_per_sample,
        optimizer=profile.optimizer,
        ranks=subject.hardware.world_size,
        on_cpu=subject.hardware.device == "cpu",
    )
    return settings, (config.get("zero_optimization") or {}).get("reduce_scatter") is not False
