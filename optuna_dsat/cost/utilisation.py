"""The share of a GPU's peak that a launch reaches: model FLOPs utilisation (MFU)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.cost.gpus import gpu_of_device, peak_flops
from optuna_dsat.cost.memory import ModelProfile

__all__ = ["utilisation"]


def utilisation(profile: ModelProfile, config: Mapping[str, Any], metrics: Mapping[str, float]) -> float | None:
    """Return the share of the GPU's peak FLOPS that a configuration reached; None if either is unknown.

    The FLOPs are those of forward and backward as the profile launch counted them, per rank
    (Chowdhery et al., arXiv:2204.02311, appendix B).

    Args:
        profile: The study's profile.
        config: The DeepSpeed config.
        metrics: What it reached, by name of the metric.
    """
    peak = peak_flops(gpu_of_device(profile.device_name), config, param_bytes=profile.param_bytes)
    reached = metrics.get("FLOPS_per_gpu")
    return None if peak is None or not reached else reached / peak
