"""Model FLOPs utilisation (MFU): share of a GPU's peak FLOPS that a launch reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.cost.gpus import gpu_of_device, peak_flops
from optuna_dsat.cost.memory import ModelProfile


def utilisation(profile: ModelProfile, config: Mapping[str, Any], metrics: Mapping[str, float]) -> float | None:
    """Return the share of the GPU's peak FLOPS that a configuration reached; None if either is unknown.

    The profile launch counts the FLOPs of forward and backward pass per rank (Chowdhery et al., arXiv:2204.02311,
    appendix B).
    """
    peak = peak_flops(gpu_of_device(profile.device_name), config, param_bytes=profile.param_bytes)
    reached = metrics.get("FLOPS_per_gpu")
    return None if peak is None or not reached else reached / peak
