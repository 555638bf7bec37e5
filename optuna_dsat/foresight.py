"""What every configuration of a space promises after some launches, and which one to launch next.

Memory is foreseen by ``optuna_dsat.memory_belief``, the time of a step by ``optuna_dsat.step_theory``. What a formula
misses of the metric is a Gaussian process on its logarithm (Rasmussen and Williams 2006, chapter 2): one residual per
structure (ZeRO stage and offload), one per value of a knob within a structure, one per lineage, a smooth one of the
share of memory in use, and one of micro-batches that are multiples of 8, whose kernels differ (NVIDIA, "Matrix
Multiplication Background"). The coefficients' uncertainty enters through the formula's derivatives. So a measured point
pulls its own lineage towards it, its structure a good deal, the others as far as the formula says.

The next launch has the largest expected improvement (Jones et al. 1998) for its seconds (Snoek et al. 2012)::

    P(fits)^2 EI / sqrt(P(fits) T_run + (1 - P(fits)) T_failed)

with EI the expected gain of the metric's logarithm over what is believed to be the best so far, ``T_run`` the start and
the profile steps, and ``T_failed`` the start alone. The root tempers the cost: divided by all of it, what is left late
in a search goes to cheap small micro-batches that cannot win (Lee et al. 2020, arXiv:2003.10870, cool it, too).

Launches in flight count as if measured as foreseen (the "kriging believer" of Ginsbourger et al. 2010), and their
lineages are left alone.

All of it follows from the finished and pending trials: nothing is kept but what the space and the profile determine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from optuna.trial import FrozenTrial

from optuna_dsat import history
from optuna_dsat.gpus import priors_of_device
from optuna_dsat.lineage import agrees, lineage_key
from optuna_dsat.lineage_table import Known, LineageTable
from optuna_dsat.memory import Hardware, ModelProfile
from optuna_dsat.memory_belief import MemoryBelief, alike, by_knob, by_structure, normal_cdf
from optuna_dsat.search_space import SearchSpace
from optuna_dsat.spec import LARGER_IS_BETTER, METRICS
from optuna_dsat.step_theory import PHASES, StepTheory, Timings

__all__ = ["Foresight", "Prospect"]

Numbers: TypeAlias = npt.NDArray[Any]

_STRUCTURE, _KNOBS, _LINEAGE, _FILL, _EIGHTS = 0.05, 0.05, 0.015, 0.03, 0.01
"""Standard deviations of the residuals' parts, relative to the metric."""
_SCALES = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""Factors on their variances, of which the likeliest is taken."""
_SCALE_SPREAD = 1.5
"""Standard deviation of the factor's logarithm before anything is measured."""
_FILL_WIDTH = 0.2
"""Share of the memory over which the residual of memory in use changes."""
_NOISE = 0.02
"""Of a measured metric, relative, from launch to launch."""
_START_S = 60.0
"""Seconds from a launch to its first step; only its ratio to the steps matters."""
_STEPS = 6
"""Steps of a launch, warm-up included."""
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
class Prospect:
    """A configuration worth a launch."""

    params: Mapping[str, Any]
    """The knobs, without the micro-batch."""
    micro_batch: int
    largest: int
    """Largest micro-batch that the lineage is expected to hold."""
    value: float
    """Expected metric."""
    fits: float
    """Probability that it fits."""


class Foresight:
    """What a space promises.

    Args:
        profile: What the profile launch taught.
        hardware: Where launches run.
        config: The user's DeepSpeed config.
        space: The search space.
        metric: What is optimised: a key of the trials' metrics (``optuna_dsat.history.METRICS``).
        memory_margin: Share of the device's memory that a launch is expected to leave free.

    Raises:
        ValueError: If the margin does not lie in [0, 1) or there is no such metric.
    """

    def __init__(
        self,
        *,
        profile: ModelProfile,
        hardware: Hardware,
        config: Mapping[str, Any],
        space: SearchSpace,
        metric: str = "throughput",
        memory_margin: float = 0.05,
    ) -> None:
        if not 0 <= memory_margin < 1:
            raise ValueError(f"memory_margin must lie in [0, 1), not {memory_margin}: it is a share of the memory")
        if metric not in METRICS:
            raise ValueError(f"metric is {metric!r}; it must be one of {', '.join(METRICS)}")
        self.metric = metric
        self.profile = profile
        self.hardware = hardware
        self.space = space
        ranks = min(hardware.ranks_per_node, hardware.world_size)
        self.device_bytes = hardware.device_memory_bytes
        if hardware.device == "cpu":
            self.device_bytes = min(self.device_bytes, hardware.host_memory_bytes // ranks)
        self.allowed_bytes = (1 - memory_margin) * self.device_bytes
        """What a launch may be expected to take."""
        self.table = LineageTable(profile=profile, hardware=hardware, config=config, space=space)
        self.theory = StepTheory(
            params=profile.params,
            trainable=profile.trainable_params,
            largest_layer=profile.largest_layer_params,
            param_bytes=profile.param_bytes,
            flops_per_sample=profile.flops_per_sample,
            ranks=hardware.world_size,
            ranks_per_node=ranks,
            machine=priors_of_device(profile.device_name, device=hardware.device, ranks=hardware.world_size),
        )
        low, high = space.micro_batches
        self.sizes = np.array(space.micro_batch_values or range(low, high + 1), dtype=np.int64)
        """All micro-batches."""
        self._accumulation = np.array([space.accumulation(int(size)) for size in self.sizes], dtype=np.float64)

        self._answered: tuple[Hashable, Prospect | None] | None = None
        """The last question and its answer: a tuner asks first whether anything is left, then what it is."""

    def next(self, trials: Sequence[FrozenTrial], fixed: Mapping[str, Any] = MappingProxyType({})) -> Prospect | None:
        """Return the configuration to launch next, None where none is left.

        Args:
            trials: The study's trials, without the one that asks.
            fixed: Knobs that the trial has already.
        """
        known = self.table.read(trials)
        samples = history.data_limit([trial for trial in trials if trial.state.is_finished()])
        question = (known.digest(), samples, lineage_key(fixed, micro_batch=""))
        if self._answered is None or self._answered[0] != question:
            self._answered = question, self._choose(known, samples, fixed)
        return self._answered[1]

    def _choose(self, known: Known, samples: int | None, fixed: Mapping[str, Any]) -> Prospect | None:
        rows = self._open(known, fixed)
        belief = _Belief(self, known, samples_limit=samples)
        rows, sizes = belief.shortlist(rows)
        if not len(rows):
            return None
        merit, goodness, fits = belief.merits(rows, sizes)
        best = int(np.argmax(merit))
        if not merit[best] > 0:
            return None
        row = int(rows[best])
        return Prospect(
            params=self.table.lineages[row],
            micro_batch=int(sizes[best]),
            largest=int(sizes[rows == row].max()),
            value=math.exp(goodness[best] if self.metric in LARGER_IS_BETTER else -goodness[best]),
            fits=float(fits[best]),
        )

    def accumulation(self, micro_batch: Numbers) -> Numbers:
        """Return the accumulation steps that go with micro-batches."""
        found: Numbers = self._accumulation[self.place(micro_batch)]
        return found

    def place(self, micro_batch: Numbers) -> Numbers:
        """Return the position in ``sizes`` of the largest one that is no larger; of the smallest where none is."""
        return np.maximum(0, np.searchsorted(self.sizes, micro_batch, side="right") - 1)

    def goodness(self, phases: Numbers, micro_batch: Numbers) -> Numbers:
        """Return the logarithm of the metric that phases (4, ..., n) make, of its inverse where less is better."""
        total = phases.sum(axis=0)
        if self.metric in ("throughput", "FLOPS_per_gpu"):
            each = self.profile.flops_per_sample if self.metric == "FLOPS_per_gpu" else self.hardware.world_size
            found: Numbers = np.log(max(1, each) * micro_batch * self.accumulation(micro_batch) / total)
            return found
        inverse: Numbers = np.log(total if self.metric == "latency" else phases[PHASES.index(self.metric)])
        return -inverse

    def slope(self, phases: Numbers, slopes: Numbers) -> Numbers:
        """Return the derivatives of the goodness, (k, n), from the phases (4, n) and theirs (4, k, n)."""
        timed = [PHASES.index(self.metric)] if self.metric in PHASES else list(range(len(PHASES)))
        relative: Numbers = slopes[timed].sum(axis=0) / phases[timed].sum(axis=0)
        return -relative

    def _open(self, known: Known, fixed: Mapping[str, Any]) -> Numbers:
        """Return the lineages that may be launched: not broken, not in flight."""
        free = np.ones(len(self.table.lineages), dtype=bool)
        free[known.row[known.pending | known.broken | known.host_too_large]] = False
        names = {tuned.name for tuned in self.space.knobs}
        held = {name: value for name, value in fixed.items() if name in names}
        rows = np.flatnonzero(free)
        if not held:
            return rows
        return rows[[agrees(self.table.lineages[row], held, strict=True) for row in rows]]


class _Belief:
    """What is believed at one moment.

    Args:
        foresight: The space and its theory.
        known: The trials.
        samples_limit: Samples per rank and step from which on the script's data is too little; None for no limit.
    """

    def __init__(self, foresight: Foresight, known: Known, *, samples_limit: int | None) -> None:
        self._of = foresight
        self._table = foresight.table
        self._known = known
        self._samples_limit = samples_limit
        self._memory = MemoryBelief(
            device_bytes=foresight.device_bytes,
            bytes_per_sample=foresight.profile.activation_bytes_per_sample,
            on_cpu=foresight.hardware.device == "cpu",
        )
        ran = known.take(_most_telling(known))
        seen = np.concatenate([np.flatnonzero(known.too_large), np.flatnonzero(known.fits & np.isnan(known.value))])
        told = known.take(seen)
        rows, sizes = np.concatenate([ran.row, told.row]), np.concatenate([ran.micro_batch, told.micro_batch])
        too_large = np.concatenate([ran.too_large, told.too_large])
        self._memory.observe(self._table.loads(rows, sizes), np.concatenate([ran.peak, told.peak]), too_large)
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
        of = self._of
        size, accumulation = ran.micro_batch, of.accumulation(ran.micro_batch)
        fill = self._fill(ran.row, size, ran.peak)
        latency = ran.phases.sum(axis=0)
        if of.metric == "latency":
            latency = np.where(np.isnan(latency), ran.value, latency)
        elif of.metric in ("throughput", "FLOPS_per_gpu"):
            each = max(1, of.profile.flops_per_sample) if of.metric == "FLOPS_per_gpu" else of.hardware.world_size
            latency = np.where(np.isnan(latency), each * size * accumulation / ran.value, latency)
        timed = np.flatnonzero(~np.isnan(latency))
        self._fitted = of.theory.fit(
            Timings(
                columns=self._table.columns.take(ran.row[timed]),
                micro_batch=size[timed],
                accumulation=accumulation[timed],
                fill=fill[timed],
                phases=ran.phases[:, timed],
                latency=latency[timed],
            )
        )
        pending = self._known.take(np.flatnonzero(self._known.pending))
        self._points = self._point(
            np.concatenate([ran.row, pending.row]),
            np.concatenate([size, pending.micro_batch]),
            np.concatenate([fill, self._fill(pending.row, pending.micro_batch, pending.peak)]),
        )
        count = len(ran.row)
        shown = np.log(ran.value) if of.metric in LARGER_IS_BETTER else -np.log(ran.value)
        self._scale = self._likeliest_scale(count, shown - self._points.goodness[:count])
        prior = self._covariance(self._points, self._points) + _NOISE**2 * np.eye(len(self._points.row))
        self._weights = np.zeros(len(self._points.row))
        self._weights[:count] = np.linalg.solve(prior[:count, :count], shown - self._points.goodness[:count])
        self._inverse = np.linalg.inv(prior)
        mean = self._points.goodness + (prior - _NOISE**2 * np.eye(len(prior))) @ self._weights
        self._best = float(mean[:count].max()) if count else None

    def _likeliest_scale(self, count: int, residuals: Numbers) -> float:
        """Return the variance of the residuals relative to the assumed one, by what the measured ones make likely.

        The theory may be right to a per cent here and wrong by a tenth there. Type II maximum likelihood (MacKay 2003,
        chapter 28) with a log-normal prior, over a few values.
        """
        points = self._points.take(np.arange(count))
        found = []
        for scale in _SCALES:
            self._scale = scale
            covariance = self._covariance(points, points) + _NOISE**2 * np.eye(count)
            fit = residuals @ np.linalg.solve(covariance, residuals) + np.linalg.slogdet(covariance)[1]
            found.append(-0.5 * fit - 0.5 * math.log(scale) ** 2 / _SCALE_SPREAD**2)
        return _SCALES[int(np.argmax(found))]

    def _fill(self, row: Numbers, size: Numbers, peak: Numbers | None = None) -> Numbers:
        expected = self._memory.peaks(self._table.loads(row, size))
        found = expected if peak is None else np.where(np.isnan(peak), expected, peak)
        return np.clip(found / self._of.device_bytes, 0.01, 1.0)

    def _point(self, row: Numbers, size: Numbers, fill: Numbers) -> _Points:
        of = self._of
        columns, accumulation = self._table.columns.take(row), of.accumulation(size)
        phases, slopes = of.theory.slopes(self._fitted, columns, size, accumulation, fill)
        root = np.linalg.cholesky(self._fitted.covariance)
        return _Points(
            row=row,
            structure=self._table.structure[row],
            knobs=self._table.knobs[row],
            eights=(size % 8 == 0).astype(np.float64),
            fill=fill,
            goodness=of.goodness(phases, size),
            latency=phases.sum(axis=0),
            doubt=of.slope(phases, slopes).T @ root,
        )

    def _covariance(self, a: _Points, b: _Points) -> Numbers:
        same = a.structure[:, None] == b.structure[None, :]
        found: Numbers = same * (_STRUCTURE**2 + _KNOBS**2 * alike(a.knobs, b.knobs))
        found += _LINEAGE**2 * (a.row[:, None] == b.row[None, :])
        found += _FILL**2 * np.exp(-0.5 * ((a.fill[:, None] - b.fill[None, :]) / _FILL_WIDTH) ** 2)
        found += _EIGHTS**2 * np.outer(a.eights, b.eights)
        found *= self._scale
        found += a.doubt @ b.doubt.T
        return found

    def shortlist(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return the configurations (rows and micro-batches) worth a closer look, of those of open lineages."""
        if not len(rows):
            return rows, rows
        of, low = self._of, int(self._of.sizes[0])
        limit = min(self._memory.limit, of.allowed_bytes)
        edge = self._memory.largest(self._table.loads(rows, np.zeros(len(rows))), limit)
        edge = np.clip(np.maximum(edge, self._fits[rows]), low, self._bursts[rows] - 1)
        shares = np.maximum(np.outer(_COARSE, edge), low)
        size = of.sizes[of.place(shares)]
        every = np.broadcast_to(rows, size.shape).ravel()
        tight = limit - self._memory.peaks(self._table.loads(every, size.ravel()))
        promise = self._quick(every, size.ravel()) + np.log(normal_cdf(tight / (_TIGHT * of.device_bytes)) + 1e-9)
        promise = promise.reshape(size.shape).max(axis=0)
        return self._closer(rows, edge, promise)

    def _quick(self, row: Numbers, size: Numbers) -> Numbers:
        """Return the expected goodness but for what only lineage and memory in use tell."""
        of, points = self._of, self._points
        phases = of.theory.phases(
            self._fitted.mean, self._table.columns.take(row), size, of.accumulation(size), self._fill(row, size)
        )
        found = of.goodness(phases, size)
        if len(points.row):
            found += (
                self._scale * _STRUCTURE**2 * by_structure(points.structure, self._weights, self._table.structure)[row]
            )
            shared = by_knob(points.structure, points.knobs, self._weights, self._table.structure, self._table.knobs)
            found += self._scale * _KNOBS**2 * shared[row]
        return found

    def _closer(self, rows: Numbers, edge: Numbers, promise: Numbers) -> tuple[Numbers, Numbers]:
        """Return micro-batches of the lineages that promise most, over all and of each structure."""
        order = np.argsort(_PLAIN * self._table.unusual[rows] - promise, kind="stable")
        structures = self._table.structure[rows[order]]
        ties = np.unique(np.stack([structures, np.round(promise[order] * 1e6)]), axis=1, return_inverse=True)[1].ravel()
        order = order[_rank_within(ties) < _TIES]
        first = _rank_within(self._table.structure[rows[order]]) < _CLOSER_EACH
        first[:_CLOSER] = True
        measured = np.isin(rows[order], self._points.row)
        chosen = order[first | (measured & (np.cumsum(measured) <= _CLOSER_MEASURED))]
        found = [(int(rows[one]), self._sizes(int(rows[one]), int(edge[one]))) for one in chosen]
        return (
            np.concatenate([np.full(len(sizes), row, dtype=np.int64) for row, sizes in found]),
            np.concatenate([sizes for _, sizes in found]),
        )

    def _sizes(self, row: int, edge: int) -> Numbers:
        """Return unused micro-batches of a lineage: all near its expected edge, some of the others."""
        of = self._of
        near = np.arange(edge - _NEAR, edge + max(_NEAR, edge // 8) + 1)
        spread = np.linspace(of.sizes[0], edge, _SPREAD)
        wanted = np.concatenate([near, spread, spread // 8 * 8, [edge // 8 * 8, edge // 8 * 8 + 8]])
        found = np.unique(of.sizes[of.place(wanted)])
        found = found[found < self._bursts[row]]
        if self._samples_limit is not None:
            found = found[found * of.accumulation(found) < self._samples_limit]
        return np.setdiff1d(found, list(self._known.used.get(row, ())))

    def merits(self, rows: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return for each configuration what a second spent on it is expected to gain, its goodness, and P(fits)."""
        of, points = self._of, self._points
        peak, fits = self._fitting(rows, sizes)
        new = self._point(rows, sizes.astype(np.float64), np.clip(peak / of.device_bytes, 0.01, 1.0))
        shared = self._covariance(new, points)
        mean = new.goodness + shared @ self._weights
        own = self._scale * (_STRUCTURE**2 + _KNOBS**2 + _LINEAGE**2 + _FILL**2 + _EIGHTS**2 * new.eights)
        own += (new.doubt**2).sum(axis=1)
        variance = own - np.einsum("ij,jk,ik->i", shared, self._inverse, shared, optimize=True)
        best = float((mean + np.log(fits + 1e-9)).max()) - _WITHOUT_ANY if self._best is None else self._best
        plain = mean - _PLAIN * self._table.unusual[rows]
        gain = _expected_improvement(plain - best, np.sqrt(np.maximum(variance, 1e-8)))
        run_s = _START_S + _STEPS * new.latency
        if self._best is not None:
            gain = gain * (fits >= _LEAST_CHANCE)
        cost_s = fits * run_s + (1 - fits) * _START_S
        return fits**_CAUTION * gain / cost_s**_THRIFT, mean, fits

    def _fitting(self, rows: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
        """Return the expected peaks, and the probabilities that a launch runs."""
        of, known = self._of, self._known
        peak, left, spread = self._memory.expect(self._table.loads(rows, sizes))
        fits = np.where(sizes <= self._fits[rows], 1.0, normal_cdf(left / spread))
        within = (peak <= of.allowed_bytes) | (sizes <= self._fits[rows])
        if within.any() or known.fits.any():
            fits = fits * within
        host, room = self._table.host[rows], float(of.hardware.host_memory_bytes)
        if known.host_too_large.any():
            room = min(room, float(self._table.host[known.row[known.host_too_large]].min()))
        fits = fits * np.where(host > 0, normal_cdf((room - host) / (_HOST_ERROR * room)), 1.0)
        count = len(self._table.lineages)
        broken = np.bincount(self._table.structure[known.row[known.broken]], minlength=count)
        sound = np.bincount(self._table.structure[known.row[known.fits]], minlength=count)
        return peak, fits * ((1 + sound) / (1 + sound + broken))[self._table.structure[rows]]


@dataclass(frozen=True, kw_only=True)
class _Points:
    """Configurations as the residuals see them, one element each."""

    row: Numbers
    structure: Numbers
    knobs: Numbers
    eights: Numbers
    fill: Numbers
    goodness: Numbers
    """By the formula alone."""
    latency: Numbers
    doubt: Numbers
    """Derivatives of the goodness times a root of the coefficients' covariance, (n, k)."""

    def take(self, index: Numbers) -> _Points:
        """Return some of them."""
        return _Points(**{one.name: getattr(self, one.name)[index] for one in fields(self)})


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
