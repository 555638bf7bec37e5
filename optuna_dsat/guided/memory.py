"""Posterior of memory use given a study's trials, and the choice of trials to condition on."""

from __future__ import annotations

import numpy as np

from optuna_dsat.cost.memory_posterior import MemoryPosterior
from optuna_dsat.cost.numbers import Numbers
from optuna_dsat.guided.candidates import Observations
from optuna_dsat.guided.problem import Problem

_MAX_OBSERVATIONS = 120
"""Largest number of measurements to condition on: the best, and as many of the latest."""


def memory_posterior(problem: Problem, observations: Observations) -> MemoryPosterior:
    """Return the posterior of memory use given a snapshot of a study's trials, and launches of earlier studies."""
    posterior = MemoryPosterior(
        device_bytes=problem.device_bytes,
        bytes_per_sample=problem.profile.activation_bytes_per_sample,
        on_cpu=problem.hardware.device == "cpu",
    )
    measured = observations.take(most_informative(observations))
    unmeasured = observations.fits & np.isnan(observations.value)
    sided = np.concatenate([np.flatnonzero(observations.device_out_of_memory), np.flatnonzero(unmeasured)])
    all_observed = (measured, observations.take(sided), problem.prior_observations)
    rows, sizes, peaks, out_of_memory = (
        np.concatenate([getattr(item, name) for item in all_observed])
        for name in ("row", "micro_batch", "peak", "device_out_of_memory")
    )
    posterior.observe(problem.table.memory_inputs(rows, sizes), peaks, out_of_memory)
    return posterior


def most_informative(observations: Observations) -> Numbers:
    """Return the measured trials to condition on: all, or if too many, the best, a few of the worst and the latest."""
    measured = np.flatnonzero(observations.fits & ~np.isnan(observations.value))
    if len(measured) <= _MAX_OBSERVATIONS:
        return measured
    spread = measured[np.argsort(observations.value[measured], kind="stable")]
    half = _MAX_OBSERVATIONS // 2
    return np.unique(np.concatenate([spread[-half:], spread[:8], measured[-half:]]))
