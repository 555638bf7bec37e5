"""What can be optimised: the names of the metrics, the direction in which each improves, and the speed-up."""

from __future__ import annotations

from typing import Literal

__all__ = ["LARGER_IS_BETTER", "METRICS", "SMALLER_IS_BETTER", "direction_of", "speed_up"]

LARGER_IS_BETTER = ("FLOPS_per_gpu", "throughput")
"""FLOP/s of one GPU, and samples/s over all ranks."""
SMALLER_IS_BETTER = ("latency", "forward", "backward", "step")
"""Seconds per step: of the whole step, and of its phases."""
METRICS = (*LARGER_IS_BETTER, *SMALLER_IS_BETTER)


def direction_of(metric: str) -> Literal["maximize", "minimize"]:
    """Return the direction in which ``metric`` improves."""
    return "maximize" if metric in LARGER_IS_BETTER else "minimize"


def speed_up(value: float | None, baseline: float | None, *, maximize: bool) -> float | None:
    """Return how many times as good as a baseline a value is; None if either is missing or 0.

    Args:
        value: The metric of a configuration.
        baseline: The metric of the configuration to compare with.
        maximize: Whether a larger metric is better.
    """
    if not value or not baseline:
        return None
    return value / baseline if maximize else baseline / value
