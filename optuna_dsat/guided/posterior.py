"""What is believed of a space at one moment of a search: memory, speed, and what a launch promises.

See ``optuna_dsat.guided.planner`` for how the parts work together.
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
from optuna_dsat.guided.candidates import Known
from optuna_dsat.guided.problem import Problem
from optuna_dsat.guided.residual_gp import Points, ResidualGP
from optuna_dsat.metrics import LARGER_IS_BETTER

__all__ = ["Acquisition", "Expected", "Posterior"]

Numbers: TypeAlias = npt.NDArray[Any]

_START_WEIGHT = 2.0
"""A launch costs more than its seconds: it counts against the budget, too."""
_START_S = 30.0
"""Seconds of a launch beside its steps, until one was measured; only their ratio to the steps matters."""
_PLAIN = 5e-4
"""What a knob away from the user's value, or DeepSpeed's default, must promise to be tried: of equals, the usual."""
_THRIFT = 0.5
"""Power of a launch's seconds by which its merit is divided."""
_CAUTION = 2
"""Power of the probability to fit: a launch that runs out of memory teaches less than what it costs."""
_LEAST_CHANCE = 0.5
"""Probability to fit below which nothing is launched any more once something has run."""
_HOST_ERROR = 0.1
"""Relative error of the predicted host memory."""
_WITHOUT_ANY = math.log(10)
"""Before anything ran, improvement is counted from a tenth of the best foreseen metric: what counts is that it runs."""
_COARSE = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
"""Shares of the largest micro-batch at which all lineages are looked at."""
_TIGHT = 0.05
"""Error of a predicted peak, relative to the device, while all lineages are looked at."""
_CLOSER, _CLOSER_EACH = 96, 8
"""Lineages looked at closely: the best, and the best of each structure."""
_CLOSER_MEASURED = 64
"""Measured lineages looked at closely: those that promise most."""
_TIES = 3
"""Of lineages that theory takes as equal, so many are looked at closely."""
_NEAR, _SPREAD = 4, 14
"""Micro-batches on either side of the expected edge, and between the smallest and the edge."""
_MOST_KNOWN = 120
"""Measurements that beliefs rest on: the best ones, and as many of the latest."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is believed of one configuration."""

    value: float
    """The metric."""
    spread: float
    """Standard deviation of the metric's logarithm."""
    peak_bytes: float
    fits: float
    """Probability that it fits."""
    bounds: Mapping[str, float]
    """Seconds of a step: see ``StepTimeModel.bounds``."""


@dataclass(frozen=True, kw_only=True)
class Acquisition:
    """What launching configurations is worth, one element each."""

    value: Numbers
    """What the next launch is chosen by."""
    gain: Numbers
    """Expected improvement over what is believed to be the best so far, of the metric's logarithm."""
    log_objective: Numbers
    """Expected logarithm of the metric (of its inverse where less is better)."""
    fits: Numbers
    """Probability that it runs."""


class Posterior:
    """What is believed at one moment.

    Args:
        problem: Model, machine, space and metric.
        known: The trials.
        samples_limit: Samples per rank and step from which on the script's data is too little; None for no limit.
    """

    def __init__(self, problem: Problem, known: Known, *, samples_limit: int | None) -> None:
        self._problem = problem
        self._table = problem.table
        self._known = known
        self._samples_limit = samples_limit
        self._memory = MemoryPosterior(
            device_bytes=problem.device_bytes,
            bytes_per_sample=problem.profile.activation_bytes_per_sample,
            on_cpu=problem.hardware.device == "cpu",
        )
        self.ran = ran = known.take(_most_telling(known))
        """Measured trials."""
        seen = np.concatenate([np.flatnonzero(known.too_large), np.flatnonzero(known.fits & np.isnan(known.value))])
        self._past = problem.past
        heard = (ran, known.take(seen), self._past)
        rows, sizes = (np.concatenate([getattr(one, name) for one in heard]) for name in ("row", "micro_batch"))
        peaks, too_large = (np.concatenate([getattr(one, name) for one in heard]) for name in ("peak", "too_large"))
        self._memory.observe(self._table.loads(rows, sizes), peaks, too_large)
        timed = known.overhead[~np.isnan(known.overhead)]
        self._start_s = _START_WEIGHT * (float(np.median(timed)) if len(timed) else _START_S)
        self._room = min(self._memory.limit, float(problem.device_bytes))
        self._fits = self._edges(known.fits, np.maximum, 0)
        """Largest micro-batch of each lineage that ran; 0 for none."""
        self._bursts = self._edges(known.too_large, np.minimum, np.iinfo(np.int64).max)
        """Smallest that was too large."""
        self._learn(ran)

    def _edges(self, chosen: Numbers, best: np.ufunc, nothing: int) -> Numbers:
        found = np.full(len(self._table.lineages), nothing, dtype=np.int64)
        best.at(found, self._known.row[chosen], self._known.micro_batch[chosen].astype(np.int64))
        return found

    def _learn(self, ran: Known) -> None:
        """Fit the coefficients, then the residuals; launches in flight count with the metric foreseen for them."""
        problem = self._problem
        size, accumulation = ran.micro_batch, problem.accumulation(ran.micro_batch)
        fill = self._fill(ran.row, size, ran.peak)
        latency = ran.phases.sum(axis=0)
        if problem.metric == "latency":
            latency = np.where(np.isnan(latency), ran.value, latency)
        elif problem.metric in ("throughput", "FLOPS_per_gpu"):
            latency = np.where(np.isnan(latency), problem.work_per_sample * size * accumulation / ran.value, latency)
        timed = np.flatnonzero(~np.isnan(latency))
        self.fitted = problem.step_time.fit(
            Timings(
                columns=self._table.columns.take(ran.row[timed]),
                micro_batch=size[timed],
                accumulation=accumulation[timed],
                fill=fill[timed],
                phases=ran.phases[:, timed],
                latency=latency[timed],
            )
        )
        past, flying = self._past, self._known.take(np.flatnonzero(self._known.pending))
        told = np.flatnonzero(~np.isnan(past.value))
        earlier = past.take(told)
        points = self._point(
            np.concatenate([ran.row, earlier.row, flying.row]),
            np.concatenate([size, earlier.micro_batch, flying.micro_batch]),
            np.concatenate([fill, *(self._fill(one.row, one.micro_batch, one.peak) for one in (earlier, flying))]),
            earlier=np.repeat([0.0, 1.0, 0.0], [len(ran.row), len(told), len(flying.row)]),
        )
        values = np.concatenate([ran.value, earlier.value])
        shown = np.log(values) if problem.metric in LARGER_IS_BETTER else -np.log(values)
        self.residuals = ResidualGP(points, shown)
        count = len(ran.row)
        self._best = float(self.residuals.posterior_means[:count].max()) if count else None

    @property
    def has_measured(self) -> bool:
        """Whether anything was measured that can be improved on."""
        return self._best is not None

    def _fill(self, row: Numbers, size: Numbers, peak: Numbers | None = None) -> Numbers:
        expected = self._memory.peaks(self._table.loads(row, size))
        found = expected if peak is None else np.where(np.isnan(peak), expected, peak)
        return self._share(found)

    def _share(self, peak: Numbers) -> Numbers:
        """Return the share of what a peak may reach that is in use."""
        found: Numbers = np.clip(peak / self._room, 0.01, 1.0)
        return found

    def _point(self, row: Numbers, size: Numbers, fill: Numbers, *, earlier: Numbers | None = None) -> Points:
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
            doubt=problem.slope(phases, slopes).T @ root,
            earlier=np.zeros(len(row)) if earlier is None else earlier,
        )

    def shortlist(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return the configurations (rows and micro-batches) worth a closer look, of those of open lineages."""
        if not len(rows):
            return rows, rows
        problem, low = self._problem, int(self._problem.sizes[0])
        limit = min(self._memory.limit, problem.allowed_bytes)
        edge = self._memory.largest(self._table.loads(rows, np.zeros(len(rows))), limit)
        edge = np.clip(np.maximum(edge, self._fits[rows]), low, self._bursts[rows] - 1)
        shares = np.maximum(np.outer(_COARSE, edge), low)
        size = problem.sizes[problem.place(shares)]
        every = np.broadcast_to(rows, size.shape).ravel()
        tight = limit - self._memory.peaks(self._table.loads(every, size.ravel()))
        promise = self._quick(every, size.ravel()) + np.log(normal_cdf(tight / (_TIGHT * problem.device_bytes)) + 1e-9)
        promise = promise.reshape(size.shape).max(axis=0)
        return self._closer(rows, edge, promise)

    def _quick(self, row: Numbers, size: Numbers) -> Numbers:
        """Return the expected goodness but for what only lineage and memory in use tell."""
        problem = self._problem
        phases = problem.step_time.phases(
            self.fitted.mean, self._table.columns.take(row), size, problem.accumulation(size), self._fill(row, size)
        )
        found: Numbers = (
            problem.log_objective(phases, size) + self.residuals.shift(self._table.structure, self._table.knobs)[row]
        )
        return found

    def _closer(self, rows: Numbers, edge: Numbers, promise: Numbers) -> tuple[Numbers, Numbers]:
        """Return micro-batches of the lineages that promise most, over all and of each structure."""
        order = np.argsort(_PLAIN * self._table.unusual[rows] - promise, kind="stable")
        structures = self._table.structure[rows[order]]
        ties = np.unique(np.stack([structures, np.round(promise[order] * 1e6)]), axis=1, return_inverse=True)[1].ravel()
        order = order[_rank_within(ties) < _TIES]
        first = _rank_within(self._table.structure[rows[order]]) < _CLOSER_EACH
        first[:_CLOSER] = True
        measured = np.isin(rows[order], self.residuals.points.row)
        chosen = order[first | (measured & (np.cumsum(measured) <= _CLOSER_MEASURED))]
        found = [(int(rows[one]), self._sizes(int(rows[one]), int(edge[one]))) for one in chosen]
        return (
            np.concatenate([np.full(len(sizes), row, dtype=np.int64) for row, sizes in found]),
            np.concatenate([sizes for _, sizes in found]),
        )

    def _sizes(self, row: int, edge: int) -> Numbers:
        """Return unused micro-batches of a lineage: all near its expected edge, some of the others."""
        problem = self._problem
        near = np.arange(edge - _NEAR, edge + max(_NEAR, edge // 8) + 1)
        spread = np.linspace(problem.sizes[0], edge, _SPREAD)
        wanted = np.concatenate([near, spread, spread // 8 * 8, [edge // 8 * 8, edge // 8 * 8 + 8]])
        found = np.unique(problem.sizes[problem.place(wanted)])
        found = found[found < self._bursts[row]]
        if self._samples_limit is not None:
            found = found[found * problem.accumulation(found) < self._samples_limit]
        return np.setdiff1d(found, list(self._known.used.get(row, ())))

    def expect(self, rows: Numbers, sizes: Numbers) -> list[Expected]:
        """Return what is believed of configurations."""
        problem = self._problem
        peak, fits = self._fitting(rows, sizes)
        fill = self._share(peak)
        size = sizes.astype(np.float64)
        mean, variance = self.residuals.expect(self._point(rows, size, fill))
        bounds = problem.step_time.bounds(
            self.fitted.mean, self._table.columns.take(rows), size, problem.accumulation(size), fill
        )
        return [
            Expected(
                value=problem.metric_of(float(mean[n])),
                spread=math.sqrt(variance[n]),
                peak_bytes=float(peak[n]),
                fits=float(fits[n]),
                bounds={name: float(seconds[n]) for name, seconds in bounds.items()},
            )
            for n in range(len(rows))
        ]

    def acquisition(self, rows: Numbers, sizes: Numbers) -> Acquisition:
        """Return what launching each configuration is worth."""
        peak, fits = self._fitting(rows, sizes)
        new = self._point(rows, sizes.astype(np.float64), self._share(peak))
        mean, variance = self.residuals.expect(new)
        best = float((mean + np.log(fits + 1e-9)).max()) - _WITHOUT_ANY if self._best is None else self._best
        plain = mean - _PLAIN * self._table.unusual[rows]
        gain = _expected_improvement(plain - best, np.sqrt(variance))
        run_s = self._start_s + self._problem.profile_steps * new.latency
        if self._best is not None:
            gain = gain * (fits >= _LEAST_CHANCE)
        fits = fits * self._works(rows)
        cost_s = fits * run_s + (1 - fits) * self._start_s
        return Acquisition(
            value=fits**_CAUTION * gain / cost_s**_THRIFT, gain=fits * gain, log_objective=mean, fits=fits
        )

    def _fitting(self, rows: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
        """Return the expected peaks, and the probabilities that they fit on device and host."""
        problem, known = self._problem, self._known
        peak, left, spread = self._memory.expect(self._table.loads(rows, sizes))
        fits = np.where(sizes <= self._fits[rows], 1.0, normal_cdf(left / spread))
        within = (peak <= problem.allowed_bytes) | (sizes <= self._fits[rows])
        if within.any() or known.fits.any():
            fits = fits * within
        host, room = self._table.host[rows], float(problem.hardware.host_memory_bytes)
        if known.host_too_large.any():
            room = min(room, float(self._table.host[known.row[known.host_too_large]].min()))
        return peak, fits * np.where(host > 0, normal_cdf((room - host) / (_HOST_ERROR * room)), 1.0)

    def _works(self, rows: Numbers) -> Numbers:
        """Return the probabilities that launches do not fail for another reason than memory, by their structures."""
        known = self._known
        count = len(self._table.lineages)
        broken = np.bincount(self._table.structure[known.row[known.broken]], minlength=count)
        sound = np.bincount(self._table.structure[known.row[known.fits]], minlength=count)
        found: Numbers = ((1 + sound) / (1 + sound + broken))[self._table.structure[rows]]
        return found


def _most_telling(known: Known) -> Numbers:
    """Return the measured trials that beliefs rest on: all, or the best and the latest of very many."""
    measured = np.flatnonzero(known.fits & ~np.isnan(known.value))
    if len(measured) <= _MOST_KNOWN:
        return measured
    spread = measured[np.argsort(known.value[measured], kind="stable")]
    half = _MOST_KNOWN // 2
    return np.unique(np.concatenate([spread[-half:], spread[:8], measured[-half:]]))


def _rank_within(groups: Numbers) -> Numbers:
    """Return how many earlier elements are of the same group, for each element."""
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
