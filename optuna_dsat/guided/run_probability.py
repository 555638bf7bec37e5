"""How probable it is that a configuration runs: that it fits on device and host, and that nothing else breaks it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optuna_dsat.cost.memory_posterior import MemoryPosterior, normal_cdf
from optuna_dsat.guided.candidates import Observations
from optuna_dsat.guided.problem import Problem

__all__ = ["RunProbability"]

Numbers: TypeAlias = npt.NDArray[Any]

_BREAKS = 4.0
"""Weight of a launch that failed, but not for memory, against one that ran: what breaks, mostly breaks again."""
_NEAR_OCTAVES = 0.5
"""Doublings of the micro-batch up to which a launch that ran out of memory speaks against smaller ones."""
_USUAL_FAILURES = 2
"""Launches of a structure that fail near its edge while that is looked for; only what goes beyond them counts."""
_HOST_SD = 0.1
"""Relative standard deviation of the predicted host memory."""


class RunProbability:
    """Probabilities given the trials of a study at one moment.

    Args:
        problem: Model, machine and space.
        observations: The trials.
        memory: Posterior of memory use given them.
    """

    def __init__(self, problem: Problem, observations: Observations, memory: MemoryPosterior) -> None:
        self._problem = problem
        self._table = problem.table
        self._observations = observations
        self._memory = memory
        self.largest_fit = self._extreme_sizes(observations.fits, np.maximum, 0)
        """Largest micro-batch of each lineage that ran, 0 if none did."""
        self.smallest_too_large = self._extreme_sizes(
            observations.device_out_of_memory, np.minimum, np.iinfo(np.int64).max
        )
        """Smallest micro-batch of each lineage that ran out of memory; the largest integer if none did."""

    def _extreme_sizes(self, chosen: Numbers, extreme: np.ufunc, default: int) -> Numbers:
        found = np.full(len(self._table.lineages), default, dtype=np.int64)
        extreme.at(found, self._observations.row[chosen], self._observations.micro_batch[chosen].astype(np.int64))
        return found

    def fits(self, rows: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
        """Return the posterior mean peaks, and the probabilities that configurations fit on device and host."""
        problem, observations = self._problem, self._observations
        peak, free, spread = self._memory.predict(self._table.memory_inputs(rows, sizes))
        fits = np.where(sizes <= self.largest_fit[rows], 1.0, normal_cdf(free / spread))
        within = (peak <= problem.allowed_bytes) | (sizes <= self.largest_fit[rows])
        if within.any() or observations.fits.any():
            fits = fits * within
        host, room = self._table.host[rows], float(problem.hardware.host_memory_bytes)
        if observations.host_out_of_memory.any():
            room = min(room, float(self._table.host[observations.row[observations.host_out_of_memory]].min()))
        fits = fits * self._seldom_fits(rows, sizes)
        return peak, fits * np.where(host > 0, normal_cdf((room - host) / max(1.0, _HOST_SD * room)), 1.0)

    def _seldom_fits(self, rows: Numbers, sizes: Numbers) -> Numbers:
        """Return factors on the probability to fit where others of the structure failed, by the rule of succession.

        What ran out of memory at no larger micro-batch and with no larger buffers counts against a configuration, what
        ran at no smaller ones for it. Where launch after launch failed at somewhat larger micro-batches, those count,
        too: the posterior is wrong about the structure then, and its edge lies elsewhere rather than one sample below.
        """
        observations, found = self._observations, np.ones(len(rows))
        buffers = self._table.buffers.sum(axis=1)
        structure, own = self._table.structure[rows], self._table.structure[observations.row]
        failed, unproven = observations.device_out_of_memory, sizes > self.largest_fit[rows]
        for one in np.unique(own[failed]):
            here = np.flatnonzero((structure == one) & unproven)
            size, needed = sizes[here, None], buffers[rows[here], None]
            lost, ran = (
                (observations.micro_batch[known], buffers[observations.row[known]])
                for known in (failed & (own == one), observations.fits & (own == one))
            )
            surely = ((lost[0] <= size) & (lost[1] <= needed)).sum(axis=1)
            nearly = np.clip(1 - np.log2(lost[0] / size) / _NEAR_OCTAVES, 0, 1).sum(axis=1)
            failures = np.maximum(surely, nearly - _USUAL_FAILURES)
            successes = ((ran[0] >= size) & (ran[1] >= needed)).sum(axis=1)
            found[here] = (1 + successes) / (1 + successes + failures)
        return found

    def is_sound(self, rows: Numbers) -> Numbers:
        """Return the probabilities that launches do not fail for reasons other than memory, by structure."""
        observations = self._observations
        count = len(self._table.lineages)
        broken = np.bincount(self._table.structure[observations.row[observations.broken]], minlength=count)
        sound = np.bincount(self._table.structure[observations.row[observations.fits]], minlength=count)
        found: Numbers = ((1 + sound) / (1 + sound + _BREAKS * broken))[self._table.structure[rows]]
        return found
