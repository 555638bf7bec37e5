"""Posterior over memory use and speed of all candidates given the trials so far, and the acquisition function on it.

See ``optuna_dsat.guided.planner`` for the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optuna_dsat.cost.memory_posterior import MemoryPosterior, normal_cdf
from optuna_dsat.cost.step_time import Timings
from optuna_dsat.guided.candidates import Observations
from optuna_dsat.guided.problem import Problem
from optuna_dsat.guided.residual_gp import Points, ResidualGP
from optuna_dsat.metrics import LARGER_IS_BETTER

__all__ = ["Acquisition", "Posterior", "Prediction", "memory_posterior"]

Numbers: TypeAlias = npt.NDArray[Any]

_START_UP_WEIGHT = 2.0
"""Factor on start-up seconds: a launch also counts against the budget of launches."""
_DEFAULT_START_UP_S = 30.0
"""Launch seconds outside training steps until one launch was measured; only the ratio to the steps matters."""
_NON_DEFAULT_PENALTY = 5e-4
"""Log objective subtracted per knob that differs from the user's value (or DeepSpeed's default), to break ties."""
_COST_POWER = 0.5
"""Power of a launch's expected seconds in the acquisition function."""
_FITS_POWER = 2
"""Power of the probability to fit: an out-of-memory launch is less informative than it is expensive."""
_MIN_FITS = 0.5
"""Probability to fit below which no candidate is launched once a metric was measured."""
_HOST_SD = 0.1
"""Relative standard deviation of the predicted host memory."""
_INITIAL_IMPROVEMENT = math.log(10)
"""Until a metric is measured, the incumbent is a tenth of the best predicted metric: running at all counts most."""
_COARSE_SHARES = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
"""Shares of each lineage's predicted edge at which all lineages are evaluated for the shortlist."""
_COARSE_PEAK_SD = 0.05
"""Standard deviation of a peak relative to the device's memory, in that evaluation."""
_SHORTLISTED, _SHORTLISTED_PER_STRUCTURE = 96, 8
"""Lineages on the shortlist: the best of all, and the best of each structure."""
_SHORTLISTED_MEASURED = 64
"""Measured lineages on the shortlist: the best."""
_MAX_TIES = 3
"""Lineages on the shortlist among those of equal predictions."""
_NEAR_EDGE, _GRID_POINTS = 4, 14
"""Micro-batches evaluated on either side of the predicted edge, and evenly between the smallest and the edge."""
_MAX_OBSERVATIONS = 120
"""Largest number of measurements conditioned on: the best, and as many of the latest."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Posterior of one configuration."""

    value: float
    """Expected metric."""
    spread: float
    """Standard deviation of the metric's logarithm."""
    peak_bytes: float
    """Expected peak of a rank."""
    fits: float
    """Probability that it fits."""
    bounds: Mapping[str, float]
    """Seconds of a step by resource, see ``StepTimeModel.bounds``."""


@dataclass(frozen=True, kw_only=True)
class Acquisition:
    """Acquisition function at n configurations; each array has length n."""

    value: Numbers
    """Acquisition value: the next launch maximizes it."""
    gain: Numbers
    """Expected improvement over the incumbent, in the metric's logarithm."""
    log_objective: Numbers
    """Posterior mean log objective: log of the metric, of its inverse if the metric is minimized."""
    fits: Numbers
    """Probability that the configuration runs."""


def memory_posterior(problem: Problem, observations: Observations) -> MemoryPosterior:
    """Return the posterior of memory use given the trials of a study at one moment, and those of earlier studies."""
    found = MemoryPosterior(
        device_bytes=problem.device_bytes,
        bytes_per_sample=problem.profile.activation_bytes_per_sample,
        on_cpu=problem.hardware.device == "cpu",
    )
    measured = observations.take(_most_informative(observations))
    unmeasured = observations.fits & np.isnan(observations.value)
    sided = np.concatenate([np.flatnonzero(observations.device_out_of_memory), np.flatnonzero(unmeasured)])
    all_observed = (measured, observations.take(sided), problem.prior_observations)
    rows, sizes, peaks, out_of_memory = (
        np.concatenate([getattr(one, name) for one in all_observed])
        for name in ("row", "micro_batch", "peak", "device_out_of_memory")
    )
    found.observe(problem.table.memory_inputs(rows, sizes), peaks, out_of_memory)
    return found


class Posterior:
    """Posterior given the trials of a study at one moment.

    Args:
        problem: Model, machine, space and metric.
        observations: The trials.
        samples_limit: Largest number of samples per rank and step for which the script's data last; None if unknown.
    """

    def __init__(self, problem: Problem, observations: Observations, *, samples_limit: int | None) -> None:
        self._problem = problem
        self._table = problem.table
        self._observations = observations
        self._largest = _largest_size(problem, samples_limit)
        """Largest micro-batch that the script's data allow."""
        self._prior_observations = problem.prior_observations
        self.measured = measured = observations.take(_most_informative(observations))
        """Measured trials."""
        self._memory = memory_posterior(problem, observations)
        timed = observations.overhead[~np.isnan(observations.overhead)]
        self._start_up_s = _START_UP_WEIGHT * (float(np.median(timed)) if len(timed) else _DEFAULT_START_UP_S)
        self._limit_bytes = min(self._memory.limit, float(problem.device_bytes))
        self._largest_fit = self._extreme_sizes(observations.fits, np.maximum, 0)
        """Largest micro-batch of each lineage that ran, 0 if none did."""
        self._smallest_too_large = self._extreme_sizes(
            observations.device_out_of_memory, np.minimum, np.iinfo(np.int64).max
        )
        """Smallest micro-batch of each lineage that ran out of memory; the largest integer if none did."""
        self._fit(measured)

    def _extreme_sizes(self, chosen: Numbers, extreme: np.ufunc, default: int) -> Numbers:
        found = np.full(len(self._table.lineages), default, dtype=np.int64)
        extreme.at(found, self._observations.row[chosen], self._observations.micro_batch[chosen].astype(np.int64))
        return found

    def _fit(self, measured: Observations) -> None:
        """Fit the coefficients, then the residuals; launches in flight count with their predicted metric."""
        problem = self._problem
        size, accumulation = measured.micro_batch, problem.accumulation(measured.micro_batch)
        fill = self._fill(measured.row, size, measured.peak)
        latency = measured.phases.sum(axis=0)
        if problem.metric == "latency":
            latency = np.where(np.isnan(latency), measured.value, latency)
        elif problem.metric in LARGER_IS_BETTER:
            latency = np.where(
                np.isnan(latency), problem.work_per_sample * size * accumulation / measured.value, latency
            )
        timed = np.flatnonzero(~np.isnan(latency))
        self.fitted = problem.step_time.fit(
            Timings(
                columns=self._table.columns.take(measured.row[timed]),
                micro_batch=size[timed],
                accumulation=accumulation[timed],
                fill=fill[timed],
                phases=measured.phases[:, timed],
                latency=latency[timed],
            )
        )
        pending = self._observations.take(np.flatnonzero(self._observations.pending))
        prior = self._prior_observations
        earlier = prior.take(np.flatnonzero(~np.isnan(prior.value)))
        points = self._points(
            np.concatenate([measured.row, earlier.row, pending.row]),
            np.concatenate([size, earlier.micro_batch, pending.micro_batch]),
            np.concatenate([fill, *(self._fill(one.row, one.micro_batch, one.peak) for one in (earlier, pending))]),
            earlier=np.repeat([0.0, 1.0, 0.0], [len(measured.row), len(earlier.row), len(pending.row)]),
        )
        values = np.concatenate([measured.value, earlier.value])
        log_objectives = np.log(values) if problem.metric in LARGER_IS_BETTER else -np.log(values)
        self.residuals = ResidualGP(points, log_objectives)
        count = len(measured.row)
        self._incumbent = float(self.residuals.posterior_means[:count].max()) if count else None

    @property
    def has_measured(self) -> bool:
        """Whether any metric was measured."""
        return self._incumbent is not None

    def _fill(self, row: Numbers, size: Numbers, peak: Numbers | None = None) -> Numbers:
        expected = self._memory.peaks(self._table.memory_inputs(row, size))
        found = expected if peak is None else np.where(np.isnan(peak), expected, peak)
        return self._share(found)

    def _share(self, peak: Numbers) -> Numbers:
        """Return peaks as a share of the largest possible peak."""
        found: Numbers = np.clip(peak / self._limit_bytes, 0.01, 1.0)
        return found

    def _points(self, row: Numbers, size: Numbers, fill: Numbers, *, earlier: Numbers | None = None) -> Points:
        problem = self._problem
        columns, accumulation = self._table.columns.take(row), problem.accumulation(size)
        phases, slopes = problem.step_time.slopes(self.fitted, columns, size, accumulation, fill)
        root = np.linalg.cholesky(self.fitted.covariance)
        return Points(
            row=row,
            structure=self._table.structure[row],
            knobs=self._table.knobs[row],
            micro_batch=size,
            fill=fill,
            log_objective=problem.log_objective(phases, size),
            latency=phases.sum(axis=0),
            coefficient_factors=problem.log_objective_slopes(phases, slopes).T @ root,
            earlier=np.zeros(len(row)) if earlier is None else earlier,
        )

    def shortlist(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return the configurations (rows and micro-batches) of these rows to evaluate the acquisition function at."""
        if not len(rows):
            return rows, rows
        problem, low = self._problem, int(self._problem.sizes[0])
        limit = min(self._memory.limit, problem.allowed_bytes)
        edge = np.maximum(low, self.edges(rows))
        shares = np.maximum(np.outer(_COARSE_SHARES, edge), low)
        size = problem.sizes[problem.size_index(shares)]
        every = np.broadcast_to(rows, size.shape).ravel()
        free = limit - self._memory.peaks(self._table.memory_inputs(every, size.ravel()))
        log_fits = np.log(normal_cdf(free / (_COARSE_PEAK_SD * problem.device_bytes)) + 1e-9)
        scores = (self._approximate_log_objective(every, size.ravel()) + log_fits).reshape(size.shape).max(axis=0)
        return self._select(rows, edge, scores)

    def edges(self, rows: Numbers) -> Numbers:
        """Return the largest micro-batch of each row that is expected to fit, within what ran and what did not."""
        limit = min(self._memory.limit, self._problem.allowed_bytes)
        edge = self._memory.largest(self._table.memory_inputs(rows, np.zeros(len(rows))), limit)
        highest = np.minimum(self._smallest_too_large[rows] - 1, self._largest)
        found: Numbers = np.minimum(np.maximum(edge, self._largest_fit[rows]), highest)
        return found

    def _approximate_log_objective(self, row: Numbers, size: Numbers) -> Numbers:
        """Return the posterior mean log objective, without the parts of lineage, memory in use and micro-batch."""
        means = self.residuals.structure_means(self._table.structure, self._table.knobs)
        found: Numbers = self.formula_log_objective(row, size) + means[row]
        return found

    def formula_log_objective(self, row: Numbers, size: Numbers) -> Numbers:
        """Return the log objective by the fitted formula of the step time alone."""
        problem = self._problem
        phases = problem.step_time.phases(
            self.fitted.mean, self._table.columns.take(row), size, problem.accumulation(size), self._fill(row, size)
        )
        return problem.log_objective(phases, size)

    def _select(self, rows: Numbers, edge: Numbers, scores: Numbers) -> tuple[Numbers, Numbers]:
        """Return the micro-batches to evaluate for the lineages of the best scores, overall and per structure."""
        order = np.argsort(_NON_DEFAULT_PENALTY * self._table.non_default_knobs[rows] - scores, kind="stable")
        structures = self._table.structure[rows[order]]
        ties = np.unique(np.stack([structures, np.round(scores[order] * 1e6)]), axis=1, return_inverse=True)[1].ravel()
        order = order[_rank_within(ties) < _MAX_TIES]
        first = _rank_within(self._table.structure[rows[order]]) < _SHORTLISTED_PER_STRUCTURE
        first[:_SHORTLISTED] = True
        measured = np.isin(rows[order], self.residuals.points.row)
        chosen = order[first | (measured & (np.cumsum(measured) <= _SHORTLISTED_MEASURED))]
        found = [(int(rows[one]), self._micro_batches(int(rows[one]), int(edge[one]))) for one in chosen]
        return (
            np.concatenate([np.full(len(sizes), row, dtype=np.int64) for row, sizes in found]),
            np.concatenate([sizes for _, sizes in found]),
        )

    def _micro_batches(self, row: int, edge: int) -> Numbers:
        """Return unused micro-batches of a lineage: all near its predicted edge, a grid below."""
        problem = self._problem
        near = np.arange(edge - _NEAR_EDGE, edge + max(_NEAR_EDGE, edge // 8) + 1)
        spread = np.linspace(problem.sizes[0], edge, _GRID_POINTS)
        wanted = np.concatenate([near, spread, spread // 8 * 8, [edge // 8 * 8, edge // 8 * 8 + 8]])
        found = np.unique(problem.sizes[problem.size_index(wanted)])
        found = found[(found < self._smallest_too_large[row]) & (found <= self._largest)]
        return np.setdiff1d(found, list(self._observations.used.get(row, ())))

    def predict(self, rows: Numbers, sizes: Numbers) -> list[Prediction]:
        """Return the prediction for each configuration."""
        problem = self._problem
        peak, fits = self._fit_probability(rows, sizes)
        fill = self._share(peak)
        size = sizes.astype(np.float64)
        mean, variance = self.residuals.predict(self._points(rows, size, fill))
        bounds = problem.step_time.bounds(
            self.fitted.mean, self._table.columns.take(rows), size, problem.accumulation(size), fill
        )
        return [
            Prediction(
                value=problem.metric_of(float(mean[n])),
                spread=math.sqrt(variance[n]),
                peak_bytes=float(peak[n]),
                fits=float(fits[n]),
                bounds={name: float(seconds[n]) for name, seconds in bounds.items()},
            )
            for n in range(len(rows))
        ]

    def acquisition(self, rows: Numbers, sizes: Numbers) -> Acquisition:
        """Return the acquisition function at configurations."""
        peak, fits = self._fit_probability(rows, sizes)
        new = self._points(rows, sizes.astype(np.float64), self._share(peak))
        mean, variance = self.residuals.predict(new)
        best = (
            float((mean + np.log(fits + 1e-9)).max()) - _INITIAL_IMPROVEMENT
            if self._incumbent is None
            else self._incumbent
        )
        penalised = mean - _NON_DEFAULT_PENALTY * self._table.non_default_knobs[rows]
        gain = _expected_improvement(penalised - best, np.sqrt(variance))
        run_s = self._start_up_s + self._problem.profile_steps * new.latency
        if self._incumbent is not None:
            gain = gain * (fits >= _MIN_FITS)
        fits = fits * self._success_probability(rows)
        cost_s = fits * run_s + (1 - fits) * self._start_up_s
        return Acquisition(
            value=fits**_FITS_POWER * gain / cost_s**_COST_POWER, gain=fits * gain, log_objective=mean, fits=fits
        )

    def _fit_probability(self, rows: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
        """Return the posterior mean peaks, and the probabilities that configurations fit on device and host."""
        problem, observations = self._problem, self._observations
        peak, free, spread = self._memory.predict(self._table.memory_inputs(rows, sizes))
        fits = np.where(sizes <= self._largest_fit[rows], 1.0, normal_cdf(free / spread))
        within = (peak <= problem.allowed_bytes) | (sizes <= self._largest_fit[rows])
        if within.any() or observations.fits.any():
            fits = fits * within
        host, room = self._table.host[rows], float(problem.hardware.host_memory_bytes)
        if observations.host_out_of_memory.any():
            room = min(room, float(self._table.host[observations.row[observations.host_out_of_memory]].min()))
        return peak, fits * np.where(host > 0, normal_cdf((room - host) / (_HOST_SD * room)), 1.0)

    def _success_probability(self, rows: Numbers) -> Numbers:
        """Return the probabilities that launches do not fail for reasons other than memory, by structure."""
        observations = self._observations
        count = len(self._table.lineages)
        broken = np.bincount(self._table.structure[observations.row[observations.broken]], minlength=count)
        sound = np.bincount(self._table.structure[observations.row[observations.fits]], minlength=count)
        found: Numbers = ((1 + sound) / (1 + sound + broken))[self._table.structure[rows]]
        return found


def _largest_size(problem: Problem, samples_limit: int | None) -> int:
    """Return the largest micro-batch within a number of samples per rank and step, the smallest of all if none is."""
    if samples_limit is None:
        return int(problem.sizes[-1])
    within = problem.sizes[problem.sizes * problem.accumulation(problem.sizes) <= samples_limit]
    return int(within[-1] if len(within) else problem.sizes[0])


def _most_informative(observations: Observations) -> Numbers:
    """Return the measured trials to condition on: all, or of too many the best, a few of the worst and the latest."""
    measured = np.flatnonzero(observations.fits & ~np.isnan(observations.value))
    if len(measured) <= _MAX_OBSERVATIONS:
        return measured
    spread = measured[np.argsort(observations.value[measured], kind="stable")]
    half = _MAX_OBSERVATIONS // 2
    return np.unique(np.concatenate([spread[-half:], spread[:8], measured[-half:]]))


def _rank_within(groups: Numbers) -> Numbers:
    """Return for each element the number of earlier elements of the same group."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    ranks = np.empty(len(groups), dtype=np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))
    return ranks


def _expected_improvement(gain: Numbers, spread: Numbers) -> Numbers:
    """Return ``E[max(0, X)]`` for X normal with these means and standard deviations."""
    z = gain / spread
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    found: Numbers = np.maximum(0.0, gain * normal_cdf(z) + spread * density)
    return found
