"""Predicted step of a configuration before any launch.

Times come from ``optuna_dsat.cost.step_time`` with coefficients from the GPU's data sheet, or fitted to launches of
the same model. The range follows from the uncertainty of the coefficients and the error of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from optuna_dsat.config import ds_config
from optuna_dsat.cost.gpus import Priors
from optuna_dsat.cost.memory import Hardware, ModelProfile
from optuna_dsat.cost.memory_posterior import MemoryPosterior
from optuna_dsat.cost.step_time import PHASES, LogCoefficients, StepTimeModel, Timings, step_inputs
from optuna_dsat.study.profile.profiled import TimedStep

_INTERVAL = 1.645
"""Standard deviations on either side of the mean that contain 90% of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and the machine of a plan."""

    profile: ModelProfile
    hardware: Hardware
    config: Mapping[str, Any]
    """The user's DeepSpeed config, or the default."""
    machine: Priors = field(default_factory=dict)
    """Coefficients of the step-time model from data sheets: median and spread of each."""
    fitted: LogCoefficients | None = None
    """Coefficients fitted to launches; None if no step was timed."""
    memory_margin: float = 0.05
    """Share of the device's memory to leave free."""
    pipeline: bool = False
    ranks_per_sample: int = 1
    """Ranks that train on the same samples, such as the stages of a pipeline."""
    nvme_path: str | None = None
    """Folder on NVMe that exists on every host; None without NVMe."""
    seq_length: int | None = None
    """Tokens per sample; None if unknown."""
    peak_flops: float | None = None
    """Peak FLOPS of a device in the precision of the config; None if unknown."""
    model_flops_per_sample: int | None = None
    """FLOPs per sample without recomputation; None for the profile's FLOPs."""

    @property
    def data_parallel_size(self) -> int:
        """Ranks that train on different samples."""
        return max(1, self.hardware.world_size // self.ranks_per_sample)

    @property
    def usable_bytes(self) -> int:
        """Device memory expected to be available to torch's allocator, in bytes per rank."""
        device = self.hardware.device_memory_bytes
        on_cpu = self.hardware.device == "cpu"
        if on_cpu:
            ranks = min(self.hardware.ranks_per_node, self.hardware.world_size)
            device = min(device, self.hardware.host_memory_bytes // ranks)
        posterior = MemoryPosterior(device_bytes=device, bytes_per_sample=0, on_cpu=on_cpu)
        return math.floor(max(1.0, min(posterior.usable, (1 - self.memory_margin) * device)))


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Predicted optimizer step of a configuration at a micro-batch."""

    step_s: float
    """Median, in seconds."""
    low_s: float
    high_s: float
    """Ends of the 90% interval, in seconds."""
    samples_per_s: float
    """Samples per second over all ranks, at the median."""
    tokens_per_s: float | None
    """Tokens per second over all ranks; None if the tokens per sample are unknown."""
    tokens_per_s_per_gpu: float | None
    """``tokens_per_s`` over the number of ranks."""
    mfu: float | None
    """Model FLOPs relative to the devices' peak FLOPS; None if either is unknown.

    Model FLOPs utilisation of Chowdhery et al. (arXiv:2204.02311, appendix B). Recomputed operations are excluded if
    they are known separately; a profile launch counts all operations.
    """
    shares: Mapping[str, float]
    """compute, link, host, memory, overhead -> share of the step time."""

    @property
    def bound(self) -> str:
        """The largest of ``shares``."""
        return max(self.shares, key=lambda name: self.shares[name])


def step_time_model(subject: Subject) -> StepTimeModel:
    """Return the step-time model of a subject with its prior."""
    return StepTimeModel.of(subject.profile, subject.hardware, machine=subject.machine, prior=subject.fitted)


def predict_steps(
    subject: Subject, configs: Sequence[Mapping[str, Any]], micro_batches: Sequence[int]
) -> list[StepPrediction]:
    """Return the predicted steps of complete configs, each at its micro-batch, in samples per rank and forward pass."""
    if not configs:
        return []
    model = step_time_model(subject)
    fitted = model.prior_coefficients()
    columns, size, steps, fill = step_inputs(subject.profile, subject.hardware, configs, micro_batches)
    phases, spread = model.expected(fitted, columns, size, steps, fill)
    total = phases.sum(axis=0)
    bounds = model.bounds(fitted.mean, columns, size, steps, fill)
    shown = np.sum(list(bounds.values()), axis=0)
    rates = size * steps * subject.data_parallel_size / total
    tokens_of_rank = None if subject.seq_length is None else subject.seq_length / subject.hardware.world_size
    return [
        StepPrediction(
            step_s=float(total[n]),
            low_s=float(total[n] * math.exp(-_INTERVAL * spread[n])),
            high_s=float(total[n] * math.exp(_INTERVAL * spread[n])),
            samples_per_s=float(rates[n]),
            tokens_per_s=None if subject.seq_length is None else float(rates[n] * subject.seq_length),
            tokens_per_s_per_gpu=None if tokens_of_rank is None else float(rates[n] * tokens_of_rank),
            mfu=_mfu(subject, float(rates[n])),
            shares=MappingProxyType({name: float(seconds[n] / shown[n]) for name, seconds in bounds.items()}),
        )
        for n in range(len(total))
    ]


def fitted_to_steps(subject: Subject, timed: Sequence[TimedStep]) -> LogCoefficients:
    """Return the coefficients fitted to n timed steps on the subject's machine."""
    configs = [step.config for step in timed]
    sizes = [config[ds_config.MICRO_BATCH] for config in configs]
    columns, size, steps, fill = step_inputs(subject.profile, subject.hardware, configs, sizes)
    phases = np.array([[step.metrics[name] for name in (*PHASES[:-1], "latency")] for step in timed]).T
    phases[-1] -= phases[:-1].sum(axis=0)
    latency = phases.sum(axis=0)
    phases[:, ~(phases > 0).all(axis=0)] = math.nan
    timings = Timings(columns=columns, micro_batch=size, accumulation=steps, fill=fill, phases=phases, latency=latency)
    return step_time_model(subject).fit(timings)


def _mfu(subject: Subject, samples_per_s: float) -> float | None:
    each = subject.model_flops_per_sample or subject.profile.flops_per_sample
    if subject.peak_flops is None or each <= 0:
        return None
    # A pipeline's profile counts the operations of a stage.
    devices = subject.data_parallel_size if subject.pipeline else subject.hardware.world_size
    return each * samples_per_s / (subject.peak_flops * devices)
