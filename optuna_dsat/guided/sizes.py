"""Micro-batches to evaluate, at every scale up to the edge of memory, and their upper limits.

The limits are the size of the dataset, a factor on the sizes that ran (``REACH``), and the gains of doublings.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from optuna_dsat.cost.numbers import Numbers
from optuna_dsat.guided.candidates import CandidateTable, Observations, are_simpler
from optuna_dsat.guided.problem import REACH, Problem
from optuna_dsat.trials.bisection import EDGE_WIDTH

LEAST_GAIN = 0.02
"""Relative gain of a doubling below which a larger micro-batch is not worth a launch."""
_ROUND = 8
"""Multiples of this number may be faster than their neighbours."""
_ROOM = 1.125
"""Least ratio of the micro-batches of a structure that saves memory and of a simpler structure."""
_NEAR_EDGE, _AROUND_EDGE = 2, (0.75, 0.9, 1.03, 1.06, 1.12)
"""Number of micro-batches evaluated on either side of the predicted edge, and additional multiples of the edge."""


def spread_sizes(edge: Numbers) -> Numbers:
    """Return micro-batches at every scale up to n predicted edges and around the edges, shape (n, k)."""
    octaves = 2.0 ** np.arange(math.ceil(math.log2(max(2, int(edge.max())))) + 1)
    below = np.minimum(octaves[None, :], edge[:, None])
    near = edge[:, None] + np.arange(-_NEAR_EDGE, _NEAR_EDGE + 1)
    wanted = np.concatenate([below, near, np.outer(edge, _AROUND_EDGE)], axis=1)
    result: Numbers = np.maximum(1, np.concatenate([wanted, wanted // 8 * 8], axis=1))
    return result


def lacks_room(table: CandidateTable, measured: Numbers, edges: Numbers, rows: Numbers, sizes: Numbers) -> Numbers:
    """Return a mask of configurations with ZeRO 3 or an offload whose micro-batch a simpler structure nearly holds.

    A micro-batch beyond the largest that is expected to fit counts as that: it is no reason to try the structure.

    Args:
        table: The candidates.
        measured: Rows that were measured; a structure with fewer of ZeRO 3 and offloads among them is simpler.
        edges: Largest micro-batch expected to fit of each row of the table.
        rows: Rows of the n configurations.
        sizes: Their micro-batches.
    """
    largest = np.zeros(len(rows))
    for group in np.unique(table.structure[measured]):
        members = table.structure == group
        kinds = table.kinds[np.argmax(members)]
        simpler = are_simpler(kinds, table.kinds[rows])
        largest[simpler] = np.maximum(largest[simpler], edges[members].max())
    result: Numbers = np.minimum(sizes, edges[rows]) <= _ROOM * largest
    return result


def raised_means(structure: Numbers, sizes: Numbers, means: Numbers, least: Numbers) -> Numbers:
    """Return the mean log objectives of n configurations, raised where a structure has too low ones.

    Of a structure and an octave of micro-batches, the configuration nearest to ``least`` gets at least that, and the
    others are raised by as much. So a structure that is simpler than a measured one is expected to be as fast at the
    same micro-batch. In published tables (``benchmarks/published``) it was so in all but one of 47 pairs.

    Args:
        structure: Index of the structure of each configuration.
        sizes: Their micro-batches.
        means: Their posterior mean log objectives.
        least: Lower bounds; -inf for configurations without one.
    """
    group = np.unique(np.stack([structure, np.floor(np.log2(sizes))]), axis=1, return_inverse=True)[1].ravel()
    nearest = np.full(len(sizes), -np.inf)
    np.maximum.at(nearest, group, means - least)
    result: Numbers = means - np.minimum(0.0, nearest[group])
    return result


def largest_size(problem: Problem, observations: Observations, *, samples_limit: int | None) -> int:
    """Return the largest micro-batch within reach of the sizes that ran, and within the samples per rank and step."""
    return min(_within_data(problem, samples_limit), _within_reach(problem, observations))


def _within_data(problem: Problem, samples_limit: int | None) -> int:
    """Return the largest micro-batch within a number of samples per rank and step, or else the smallest micro-batch."""
    if samples_limit is None:
        return int(problem.sizes[-1])
    within = problem.sizes[problem.sizes * problem.accumulation(problem.sizes) <= samples_limit]
    return int(within[-1] if len(within) else problem.sizes[0])


class UnusedSizes:
    """Micro-batches without a trial, except any too close to a trial's for it to tell anything.

    Near the edge of memory close micro-batches tell where it is. Where the dataset ends micro-batches first, a trial
    has nothing to learn from them, unless the number is rounder.

    Args:
        problem: The search.
        used: Micro-batches with a trial, by row.
        samples_limit: Largest number per rank and step that the dataset allows; None if unknown.
    """

    def __init__(self, problem: Problem, used: Mapping[int, Collection[int]], *, samples_limit: int | None) -> None:
        self._problem, self._used = problem, used
        self._within_data = _within_data(problem, samples_limit)
        pairs = np.array([(row, size) for row, sizes in used.items() for size in sizes], dtype=np.int64).reshape(-1, 2)
        self._keys = self._keys_of(pairs[:, 0], problem.size_index(pairs[:, 1]))

    def _keys_of(self, rows: Numbers, index: Numbers) -> Numbers:
        """Return a number for each configuration: its row times the number of sizes, plus the index of its size."""
        return rows * len(self._problem.sizes) + index

    def nearest(self, rows: Numbers, wanted: Numbers, *, below: Numbers, edges: Numbers) -> tuple[Numbers, Numbers]:
        """Return the distinct rows and unused micro-batches nearest to the wanted ones.

        Args:
            rows: Rows of the table, shape (n,).
            wanted: Micro-batches of each, shape (n, k).
            below: Smallest micro-batch of each row that is not allowed, shape (n,).
            edges: Largest micro-batch expected to fit of each row of the table.
        """
        sizes, index = self._problem.sizes, self._problem.size_index(wanted)
        keys = np.unique(self._keys_of(rows[:, None], index)[sizes[index] < below[:, None]])
        keys = keys[~np.isin(keys, self._keys)]
        rows, unused = keys // len(sizes), sizes[keys % len(sizes)]
        new = ~self._is_near(rows, unused, edges)
        return rows[new], unused[new]

    def _is_near(self, rows: Numbers, sizes: Numbers, edges: Numbers) -> Numbers:
        result = np.zeros(len(rows), dtype=bool)
        for row, used in self._used.items():
            for size in used if edges[row] >= self._within_data else ():
                rounder = (sizes % _ROUND == 0) & (size % _ROUND > 0)
                result |= (rows == row) & (np.abs(sizes - size) <= EDGE_WIDTH * size) & ~rounder
        return result


def _within_reach(problem: Problem, observations: Observations) -> int:
    """Return the largest micro-batch within reach of the sizes that ran and of the baseline."""
    ran = max(observations.micro_batch[observations.fits], default=0)
    within = problem.sizes[problem.sizes <= REACH * max(ran, problem.user_micro_batch)]
    return int(within[-1] if len(within) else problem.sizes[0])


def paying_sizes(structure: Numbers, size: Numbers, gain: Numbers, *, count: int) -> Numbers:
    """Return the largest micro-batch worth trying for each structure by the gains of doublings; infinite if unlimited.

    The limit of a structure is the smallest micro-batch at which a doubling gained less than ``LEAST_GAIN``. Structures
    without such a micro-batch are limited to twice the largest limit of the others, or twice their largest size.

    ``gain`` is the estimated gain of each launch over half its micro-batch, in the metric's logarithm.
    """
    smallest, largest = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(smallest, structure, size)
    np.maximum.at(largest, structure, size)
    flat = (2 * smallest[structure] <= size) & (gain < math.log1p(LEAST_GAIN))
    result = np.full(count, np.inf)
    np.minimum.at(result, structure[flat], size[flat])
    ends = result[np.isfinite(result)]
    if not len(ends):
        return result
    return np.where(np.isfinite(result), result, 2 * np.maximum(ends.max(), largest))


def outgrown_size(structure: Numbers, size: Numbers, mean: Numbers) -> float:
    """Return the largest measured micro-batch that a search has climbed past; 0 if there is none.

    At least twice the micro-batch gained ``LEAST_GAIN`` in the same structure, and the best configuration has at least
    twice the micro-batch. ``mean`` are posterior mean log objectives.
    """
    if not len(size):
        return 0.0
    doubled = (structure[:, None] == structure[None, :]) & (2 * size[:, None] <= size[None, :])
    gained = mean[None, :] - mean[:, None] >= math.log1p(LEAST_GAIN)
    passed = (doubled & gained).any(axis=1) & (2 * size <= size[int(np.argmax(mean))])
    return float(size[passed].max(initial=0.0))
