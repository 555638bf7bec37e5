"""Micro-batches that are worth a look: at every scale up to the edge of memory, and how large one may be."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optuna_dsat.guided.candidates import Observations
from optuna_dsat.guided.problem import Problem

__all__ = ["largest_size", "spread_sizes"]

Numbers: TypeAlias = npt.NDArray[Any]

_NEAR_EDGE, _AROUND_EDGE = 2, (0.75, 0.9, 1.03, 1.06, 1.12)
"""Micro-batches evaluated on either side of the predicted edge, and multiples of the edge evaluated beside them."""


def spread_sizes(edge: Numbers) -> Numbers:
    """Return micro-batches at every scale up to n predicted edges, and around those, shape (n, k)."""
    octaves = 2.0 ** np.arange(math.ceil(math.log2(max(2, int(edge.max())))) + 1)
    below = np.minimum(octaves[None, :], edge[:, None])
    near = edge[:, None] + np.arange(-_NEAR_EDGE, _NEAR_EDGE + 1)
    wanted = np.concatenate([below, near, np.outer(edge, _AROUND_EDGE)], axis=1)
    found: Numbers = np.maximum(1, np.concatenate([wanted, wanted // 8 * 8], axis=1))
    return found


def largest_size(problem: Problem, observations: Observations, *, samples_limit: int | None) -> int:
    """Return the largest micro-batch that the script's data allow, within reach of what ran.

    Args:
        problem: Model, machine, space and metric.
        observations: The trials.
        samples_limit: Largest number of samples per rank and step for which the script's data last; None if unknown.
    """
    return min(_within_data(problem, samples_limit), _within_reach(problem, observations))


def _within_data(problem: Problem, samples_limit: int | None) -> int:
    """Return the largest micro-batch within a number of samples per rank and step, the smallest of all if none is."""
    if samples_limit is None:
        return int(problem.sizes[-1])
    within = problem.sizes[problem.sizes * problem.accumulation(problem.sizes) <= samples_limit]
    return int(within[-1] if len(within) else problem.sizes[0])


def _within_reach(problem: Problem, observations: Observations) -> int:
    """Return the largest micro-batch within reach of those that ran, and of the user's own."""
    if problem.reach is None:
        return int(problem.sizes[-1])
    ran = max(observations.micro_batch[observations.fits], default=0)
    within = problem.sizes[problem.sizes <= problem.reach * max(ran, problem.user_micro_batch)]
    return int(within[-1] if len(within) else problem.sizes[0])
