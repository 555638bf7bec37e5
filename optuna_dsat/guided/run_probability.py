"""Probability that a configuration runs: it fits on device (by the posterior of memory) and host, and does not fail."""

from __future__ import annotations

import math

import numpy as np

from optuna_dsat.cost.memory_posterior import MemoryPosterior, normal_cdf
from optuna_dsat.cost.numbers import Numbers
from optuna_dsat.guided.candidates import Observations
from optuna_dsat.guided.diagnosis import Diagnosis
from optuna_dsat.guided.problem import Problem

_BLAMED = 0.5
"""Probability above which the micro-batch is considered the cause of failures."""
_APART = 1.25
"""Ratio of micro-batches above which an out-of-memory launch is not explained by the additional samples alone."""
_NEAR_OCTAVES = 0.5
"""Doublings of the micro-batch up to which an out-of-memory launch is evidence against smaller micro-batches."""
_USUAL_FAILURES = 2
"""Expected number of failures near the edge of a structure while the edge is searched; only excess failures count."""
_SURE_SHARE = 0.5
"""Minimum memory of a larger micro-batch, as a share of the profiled activations."""
_SURE_WEIGHT = 4
"""Weight of a failure that rules out a configuration, except for the variation between launches."""
_HOST_SD = 0.1
"""Relative standard deviation of the predicted host memory."""


class RunProbability:
    """Probabilities given a snapshot of a study's trials."""

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
        self._size_component = len(problem.table.components.priors) - 1
        self._largest_run = float(observations.micro_batch[observations.fits].max(initial=0.0))
        beyond = observations.broken & (observations.micro_batch > self._largest_run) & observations.fits.any()
        self._smallest_failed = float(observations.micro_batch[beyond].min(initial=math.inf))
        """Smallest micro-batch above all that ran that failed for another reason than memory."""
        self._diagnosis = self._diagnosed()

    def _extreme_sizes(self, chosen: Numbers, extreme: np.ufunc, default: int) -> Numbers:
        result = np.full(len(self._table.lineages), default, dtype=np.int64)
        extreme.at(result, self._observations.row[chosen], self._observations.micro_batch[chosen].astype(np.int64))
        return result

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
        """Return factors on the probability to fit given failures of the structure, by the rule of succession.

        An out-of-memory launch at the same or a smaller micro-batch counts against a configuration, unless the
        configuration saves more memory on buffers than its additional samples need. A launch that ran at the same or a
        larger micro-batch, with the same or larger buffers, counts in its favour. Repeated failures at somewhat larger
        micro-batches also count: the posterior is then wrong about the structure, and the edge is probably not just
        below the failures. Until the edge is known to half a doubling, all failures count against the upper half of
        its possible range, in the logarithm.
        """
        observations, result = self._observations, np.ones(len(rows))
        buffers = self._table.buffers.sum(axis=1)
        structure, observed = self._table.structure[rows], self._table.structure[observations.row]
        failed, unproven = observations.device_out_of_memory, sizes > self.largest_fit[rows]
        for group in np.unique(observed[failed]):
            here = np.flatnonzero((structure == group) & unproven)
            size, needed = sizes[here, None], buffers[rows[here], None]
            lost, ran = (
                (observations.micro_batch[known], buffers[observations.row[known]])
                for known in (failed & (observed == group), observations.fits & (observed == group))
            )
            samples = _SURE_SHARE * self._problem.profile.activation_bytes_per_sample * (size - lost[0])
            surely = _SURE_WEIGHT * ((lost[0] <= size) & (lost[1] <= needed + samples)).sum(axis=1)
            nearly = np.clip(1 - np.log2(lost[0] / size) / _NEAR_OCTAVES, 0, 1).sum(axis=1)
            failures = np.maximum(surely, nearly - _USUAL_FAILURES)
            least, most = float(lost[0].min()), float(ran[0].max(initial=1.0))
            if least > most * 2**_NEAR_OCTAVES:
                upper = size[:, 0] > math.sqrt(least * most)
                failures = np.where(upper, np.maximum(failures, len(lost[0]) - _USUAL_FAILURES), failures)
            successes = ((ran[0] >= size) & (ran[1] >= needed)).sum(axis=1)
            result[here] = (1 + successes) / (1 + successes + failures)
        return result

    def is_sound(self, rows: Numbers, sizes: Numbers) -> Numbers:
        """Return the probabilities that launches do not fail for reasons other than memory."""
        if self._diagnosis is None:
            return np.ones(len(rows))
        return self._diagnosis.runs(self._components(rows, sizes))

    @property
    def largest_sound(self) -> int:
        """Largest micro-batch to try if larger ones fail for a reason that the memory model does not know.

        Examples are a collator that accepts only a single sample, and a limit that the peaks do not show. Once the size
        is the probable cause, the range between successful and failed sizes is bisected geometrically.
        """
        sizes, failed = self._problem.sizes, math.inf
        if self._diagnosis is not None and self._diagnosis.probability_of(self._size_component) > _BLAMED:
            failed = self._smallest_failed
        if self._memory.unexplained > _APART * self._largest_run:
            failed = min(failed, self._memory.unexplained)
        within = sizes[sizes <= math.sqrt(self._largest_run * failed)] if failed < math.inf else sizes
        return int(within[-1] if len(within) else sizes[0])

    def _diagnosed(self) -> Diagnosis | None:
        """Return the diagnosis of broken launches; None if no launch is broken."""
        observations = self._observations
        if not observations.broken.any():
            return None
        failed, ran = (
            self._components(observations.row[chosen], observations.micro_batch[chosen])
            for chosen in (observations.broken, observations.fits)
        )
        return Diagnosis(failed, ran, priors=self._table.components.priors)

    def _components(self, rows: Numbers, sizes: Numbers) -> Numbers:
        """Return the numbers of the components of configurations, shape (n, k)."""
        too_large = np.where(sizes >= self._smallest_failed, self._size_component, -1)
        return np.column_stack([self._table.components.numbers[rows], too_large])


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
