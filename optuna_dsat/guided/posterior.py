"""Posterior over memory use and speed of all candidates given the trials so far, and its acquisition function.

See ``optuna_dsat.guided.planner`` for the method.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from optuna_dsat.cost.memory_posterior import normal_cdf
from optuna_dsat.cost.numbers import Numbers, descending
from optuna_dsat.cost.step_time import Timings
from optuna_dsat.guided.acquisition import (
    Acquisition,
    Prediction,
    Prospects,
    expected_improvement,
    heavy_tailed_improvement,
    learnt_spread,
)
from optuna_dsat.guided.candidates import Observations, are_simpler, rank_within
from optuna_dsat.guided.problem import Problem
from optuna_dsat.guided.residual_gp import CPU_NOISE_SD, NOISE_SD, Points, ResidualGP
from optuna_dsat.guided.run_probability import RunProbability, memory_posterior, most_informative
from optuna_dsat.guided.sizes import (
    LEAST_GAIN,
    UnusedSizes,
    lacks_room,
    largest_size,
    paying_sizes,
    raised_means,
    spread_sizes,
)
from optuna_dsat.metrics import LARGER_IS_BETTER

_DEAR = 10.0
"""Largest duration of a launch, relative to the baseline's micro-batch, that requires no matching gain."""
_START_UP_WEIGHT = 2.0
"""Factor on start-up seconds: a launch also counts against the budget of launches."""
_ORDER_S = 0.1
"""Seconds outside training steps of a trial that continues a launch."""
_NON_DEFAULT_PENALTY = 5e-4
"""Log objective subtracted per knob that differs from the user's value (or DeepSpeed's default), to break ties."""
_LARGER_PENALTY = 2e-4
"""Log objective subtracted per doubling of the micro-batch, so that ties are won by the smaller micro-batch."""
DOUBTED_FORMULA = 0.12
"""Relative error of the step-time formula assumed during a search.

It is larger than the formula's error where the formula holds, because a close fit to the measurements would otherwise
be overconfident about other structures on machines where the formula does not hold.
"""
_DOUBTED_DEFICIT = math.log(2)
"""Largest predicted deficit in log objective for which heavy-tailed errors are assumed."""
_SELDOM = 0.05
"""Factor on the gain of ZeRO 3 or an offload at about the micro-batch that a simpler structure holds. In published
tables (``benchmarks/published``) it was faster in one of 47 such pairs, by 3%; by table, in 5% of them.
"""
_MIN_FITS = 0.05
"""Minimum probability to run of launched candidates, once a metric was measured."""
_HOPEFUL, _HOPE_SIGMAS = 160, 2.0
"""Number of unmeasured configurations considered for the possible gain, and the standard deviations above the mean
by which they are ranked."""
_INITIAL_IMPROVEMENT = math.log(10)
"""Until a metric is measured, the incumbent is a tenth of the best predicted metric: running at all counts most."""
_COARSE_SHARES = (1.0, 0.9, 0.7, 0.5, 0.35, 0.25, *(2.0**-octave for octave in range(3, 13)))
"""Shares of each lineage's predicted edge at which all lineages are evaluated for the shortlist."""
_SAMPLED_ROWS = 24
"""Lineages of each structure from which the best of these shares are chosen."""
_COARSE_PEAK_SD = 0.05
"""Standard deviation of a peak relative to the device's memory, in that evaluation."""
_SHORTLISTED, _SHORTLISTED_PER_STRUCTURE = 96, 8
"""Lineages on the shortlist: the best of all, and the best of each structure."""
_SHORTLISTED_MEASURED = 64
"""Measured lineages on the shortlist: the best."""
_USUAL_FILL = 0.5
"""Share of memory in use at which the predicted effects of structures and knobs are compared."""
_BOUND_SIGMAS = 1.0
"""Standard deviations of the knobs' parts added to the mean when ranking lineages for the shortlist."""
_NEIGHBOURED = 3
"""Lineages of the best posterior means whose single-knob neighbours are also on the shortlist."""
_MAX_TIES = 3
"""Lineages on the shortlist among lineages of equal predictions."""
_REFINED = 8
"""Configurations of the largest acquisition values around which more micro-batches are evaluated."""
_FINE = tuple(2 ** (sixth / 6) for sixth in range(-6, 7))
"""Multiples of their micro-batches to evaluate."""


class Posterior:
    """Posterior given a snapshot of a study's trials; ``formula_error`` is relative.

    ``samples_limit`` is the largest number per rank and step that the dataset allows; None if unknown.
    """

    def __init__(
        self,
        problem: Problem,
        observations: Observations,
        *,
        samples_limit: int | None,
        formula_error: float = DOUBTED_FORMULA,
    ) -> None:
        self._problem = problem
        self._table = problem.table
        self._observations = observations
        self._prior_observations = problem.prior_observations
        self.measured = measured = observations.take(most_informative(observations))
        """Measured trials."""
        self.known_structures = np.unique(
            self._table.structure[np.concatenate([measured.row, problem.prior_observations.row])]
        )
        """Structures that this study or an earlier study measured."""
        self._memory = memory_posterior(problem, observations)
        timed = observations.overhead[~np.isnan(observations.overhead)]
        self._start_up_s = _START_UP_WEIGHT * (float(np.median(timed)) if len(timed) else problem.start_s)
        self._limit_bytes = max(1.0, min(self._memory.limit, float(problem.device_bytes)))
        self._runs = RunProbability(problem, observations, self._memory)
        self._largest = min(largest_size(problem, observations, samples_limit=samples_limit), self._runs.largest_sound)
        """Largest micro-batch that the dataset allows, within reach of a size that ran and below failing sizes."""
        self._unused = UnusedSizes(problem, observations.used, samples_limit=samples_limit)
        self._fit(measured, formula_error)

    def paying_sizes(self, rows: Numbers) -> Numbers:
        """Return the largest micro-batch of each row worth trying by the gains of doublings; infinite if unlimited."""
        problem = self._problem
        asked = np.flatnonzero(problem.is_asked(self.measured.micro_batch, self.measured.accumulation))
        measured, count = self.measured.take(asked), int(self._table.structure.max()) + 1
        if problem.metric not in LARGER_IS_BETTER or not len(asked):
            return np.full(len(rows), np.inf)
        half, size = measured.micro_batch / 2, measured.micro_batch
        points = self._points(measured.row, half, self._fill(measured.row, half))
        gain = self.residuals.posterior_means[asked] - self.residuals.predict(points)[0]
        result = paying_sizes(self._table.structure[measured.row], size, gain, count=count)
        return result[self._table.structure[rows]]

    @cached_property
    def all_edges(self) -> Numbers:
        """Edges of all rows of the table."""
        return self.edges(np.arange(len(self._table.lineages)))

    def seldom(self, rows: Numbers, sizes: Numbers) -> Numbers:
        """Return the factor on the gain: below 1 for unmeasured structures that save memory which buys nothing."""
        unknown = ~np.isin(self._table.structure[rows], self.known_structures)
        unneeded = lacks_room(self._table, self.measured.row, self.all_edges, rows, sizes)
        return np.where(unknown & unneeded, _SELDOM, 1.0)

    def _at_least_as_fast(self, rows: Numbers, sizes: Numbers, means: Numbers) -> Numbers:
        """Return mean log objectives, raised for structures that are simpler than a measured one (``raised_means``)."""
        table, count = self._table, len(self.measured.row)
        parts = np.column_stack([table.columns.stage, table.columns.offload, table.columns.offload_param])
        unknown = ~np.isin(table.structure[rows], self.known_structures)
        least = np.full(len(rows), -np.inf)
        order = descending(self.residuals.posterior_means[:count])
        first = np.unique(table.structure[self.measured.row[order]], return_index=True)[1]
        for best in self.measured.row[order[first]]:
            simpler = unknown & are_simpler(parts[rows], parts[best])
            if not simpler.any():
                continue
            distinct, index = np.unique(sizes[simpler], return_inverse=True)
            row, size = np.full(len(distinct), best), distinct.astype(np.float64)
            mean = self.residuals.predict(self._points(row, size, self._fill(row, size)))[0]
            least[simpler] = np.maximum(least[simpler], mean[index])
        return raised_means(table.structure[rows], sizes, means, least)

    def largest_worth(self, row: int) -> int:
        """Return the largest micro-batch of a row that is within reach, pays and is not dear."""
        least, most = self._problem.sizes[0], int(min(self._largest, self.paying_sizes(np.array([row]))[0]))
        sizes = np.unique(spread_sizes(np.array([most])))
        sizes = sizes[(least <= sizes) & (sizes <= most)]
        return int(sizes[~self.is_dear(self.acquisition(np.full(len(sizes), row), sizes))].max(initial=least))

    def _fit(self, measured: Observations, formula_error: float) -> None:
        """Fit the coefficients, then the residuals; running launches count with their predicted metric."""
        problem = self._problem
        size, accumulation = measured.micro_batch, measured.accumulation
        fill = self._fill(measured.row, size, measured.peak)
        latency = measured.phases.sum(axis=0)
        if problem.metric == "latency":
            latency = np.where(np.isnan(latency), measured.value, latency)
        elif problem.metric in LARGER_IS_BETTER:
            latency = np.where(
                np.isnan(latency), problem.work_per_sample * size * accumulation / measured.value, latency
            )
        timed = np.flatnonzero(~np.isnan(latency))
        timings = Timings(
            columns=self._table.columns.take(measured.row[timed]),
            micro_batch=size[timed],
            accumulation=accumulation[timed],
            fill=fill[timed],
            phases=measured.phases[:, timed],
            latency=latency[timed],
        )
        self.fitted = problem.step_time.fit(timings, error=formula_error)
        self._structure_effects, self._knob_effects = self._predicted_effects(measured)
        pending = self._observations.take(np.flatnonzero(self._observations.pending))
        prior = self._prior_observations
        earlier = prior.take(np.flatnonzero(~np.isnan(prior.value)))
        every = (measured, earlier, pending)
        points = self._points(
            np.concatenate([known.row for known in every]),
            np.concatenate([known.micro_batch for known in every]),
            np.concatenate([self._fill(known.row, known.micro_batch, known.peak) for known in every]),
            accumulation=np.concatenate([known.accumulation for known in every]),
            earlier=np.repeat([0.0, 1.0, 0.0], [len(known.row) for known in every]),
            launch=np.concatenate([known.launch for known in every]),
        )
        values = np.concatenate([measured.value, earlier.value])
        log_objectives = np.log(values) if problem.metric in LARGER_IS_BETTER else -np.log(values)
        noise_sd = CPU_NOISE_SD if problem.hardware.device == "cpu" else NOISE_SD
        self.residuals = ResidualGP(points, log_objectives, problem.table.knob_kernels, noise_sd=noise_sd)
        self.rivals = np.arange(len(measured.row) + len(earlier.row))
        """Index of the measurements, of this study and then of earlier ones, that answer the question of the space."""
        if problem.space.asked_samples_per_rank is not None:
            self.rivals = np.flatnonzero(problem.is_asked(size, accumulation))
        means = self.residuals.posterior_means
        new = self.rivals[self.rivals < len(measured.row)]
        self.best = int(new[descending(means[new])[0]]) if len(new) else None
        """Index of the best measurement of this study by posterior mean; None before a metric was measured."""
        self.incumbent = None if self.best is None else float(means[self.best])
        """Posterior mean log objective of ``best``; None without it."""

    def _predicted_effects(self, measured: Observations) -> tuple[Numbers, Numbers]:
        """Return the effects of structures and knobs by the fitted formula, at the best measured micro-batch.

        Returns:
            For each row, the effect of its structure on the log objective, relative to the best measured row, shape
            (rows,); and the effect of each knob's value, relative to the mean in the structure, shape (rows, knobs).
        """
        table, rows = self._table, np.arange(len(self._table.lineages))
        larger = self._problem.metric in LARGER_IS_BETTER
        best = int(np.argmax(measured.value if larger else -measured.value)) if len(measured.row) else None
        size = self._problem.sizes[0] if best is None else min(self._problem.sizes[-1], measured.micro_batch[best])
        result = self._formula(rows, np.full(len(rows), float(size)), np.full(len(rows), _USUAL_FILL))
        means = np.bincount(table.structure, result) / np.bincount(table.structure)
        structure = means[table.structure] - (
            means.max() if best is None else means[table.structure[measured.row[best]]]
        )
        knobs = table.marginal_means(result) - means[table.structure][:, None]
        return structure, knobs

    def _fill(self, row: Numbers, size: Numbers, peak: Numbers | None = None) -> Numbers:
        expected = self._memory.peaks(self._table.memory_inputs(row, size))
        result = expected if peak is None else np.where(np.isnan(peak), expected, peak)
        return self._share(result)

    def _share(self, peak: Numbers) -> Numbers:
        """Return peaks as a share of the largest possible peak."""
        return np.asarray(np.clip(peak / self._limit_bytes, 0.01, 1.0))

    def _points(
        self,
        row: Numbers,
        size: Numbers,
        fill: Numbers,
        *,
        accumulation: Numbers | None = None,
        earlier: Numbers | None = None,
        launch: Numbers | None = None,
    ) -> Points:
        problem, columns = self._problem, self._table.columns.take(row)
        accumulation = problem.accumulation(size) if accumulation is None else accumulation
        phases, slopes = problem.step_time.slopes(self.fitted, columns, size, accumulation, fill)
        root = np.linalg.cholesky(self.fitted.covariance)
        return Points(
            row=row,
            structure=self._table.structure[row],
            kinds=self._table.kinds[row],
            knobs=self._table.knobs[row],
            structure_effect=self._structure_effects[row],
            knob_effects=self._knob_effects[row],
            micro_batch=size,
            fill=fill,
            log_objective=problem.log_objective(phases, size * accumulation),
            latency=phases.sum(axis=0),
            coefficient_factors=problem.log_objective_slopes(phases, slopes).T @ root,
            earlier=np.zeros(len(row)) if earlier is None else earlier,
            launch=np.full(len(row), -1) if launch is None else launch,
        )

    def shortlist(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return the configurations (rows and micro-batches) at which to evaluate the acquisition function."""
        if not len(rows):
            return rows, rows
        edge = np.maximum(int(self._problem.sizes[0]), self.edges(rows))
        structure = self._table.structure[rows]
        scores = np.full(len(rows), -np.inf)
        for share in self._promising_shares(edge, rows, structure):
            scores = np.maximum(scores, self._coarse_scores(rows, share * edge))
        return self._select(rows, edge, scores + self._knob_bounds(rows, structure))

    def _promising_shares(self, edge: Numbers, rows: Numbers, structure: Numbers) -> Numbers:
        """Return the shares of the edge at which each row is worth evaluating, shape (2, rows).

        The shares have the best scores among sampled rows of the structure; knobs hardly change the best micro-batch.
        """
        result = np.ones((2, len(rows)))
        shares = np.array(_COARSE_SHARES)
        for group in np.unique(structure):
            members = np.flatnonzero(structure == group)
            some = members[:: max(1, len(members) // _SAMPLED_ROWS)]
            sizes = np.outer(shares, edge[some])
            scores = self._coarse_scores(np.broadcast_to(rows[some], sizes.shape).ravel(), sizes.ravel())
            best = scores.reshape(sizes.shape).max(axis=1)
            result[:, members] = shares[descending(best)[:2], None]
        return result

    def _coarse_scores(self, rows: Numbers, sizes: Numbers) -> Numbers:
        """Return posterior mean log objectives without the knobs' part, plus the log of the probability to fit."""
        problem = self._problem
        size = problem.sizes[problem.size_index(np.maximum(sizes, problem.sizes[0]))]
        peak = self._memory.peaks(self._table.memory_inputs(rows, size))
        limit = min(self._memory.limit, problem.allowed_bytes)
        log_fits = np.log(normal_cdf((limit - peak) / (_COARSE_PEAK_SD * problem.device_bytes)) + 1e-9)
        structure = self._table.structure[rows]
        return (
            self._formula(rows, size, self._share(peak))
            + log_fits
            + self.residuals.size_means(structure, size.astype(np.float64))
            + self.residuals.structure_means(structure, self._table.kinds[rows], self._structure_effects[rows])
        )

    def _knob_bounds(self, rows: Numbers, structure: Numbers) -> Numbers:
        """Return an upper confidence bound of the knobs' parts of the residual for rows, given their structures."""
        result = np.zeros(len(rows))
        for group in np.unique(structure):
            members = np.flatnonzero(structure == group)
            mean, variance = self.residuals.knob_moments(
                int(group), self._table.knobs[rows[members]], self._knob_effects[rows[members]]
            )
            result[members] = mean + _BOUND_SIGMAS * np.sqrt(variance)
        return result

    def edges(self, rows: Numbers) -> Numbers:
        """Return the largest micro-batch of each row expected to fit, bounded by observed successes and failures."""
        limit = min(self._memory.limit, self._problem.allowed_bytes)
        edge = self._memory.largest(self._table.memory_inputs(rows, np.zeros(len(rows))), limit)
        highest = np.minimum(self._runs.smallest_too_large[rows] - 1, self._largest)
        result: Numbers = np.minimum(np.maximum(edge, self._runs.largest_fit[rows]), highest)
        return result

    def formula_log_objective(self, row: Numbers, size: Numbers) -> Numbers:
        """Return the log objective predicted by the fitted step-time formula alone."""
        return self._formula(row, size, self._fill(row, size))

    def _formula(self, row: Numbers, size: Numbers, fill: Numbers) -> Numbers:
        problem, columns = self._problem, self._table.columns.take(row)
        phases = problem.step_time.phases(self.fitted.mean, columns, size, problem.accumulation(size), fill)
        return problem.log_objective(phases, size * problem.accumulation(size))

    def _select(self, rows: Numbers, edge: Numbers, scores: Numbers) -> tuple[Numbers, Numbers]:
        """Return the micro-batches to evaluate for the lineages of the best scores, overall and per structure."""
        order = descending(scores - _NON_DEFAULT_PENALTY * self._table.non_default_knobs[rows])
        structures = self._table.structure[rows[order]]
        ties = np.unique(np.stack([structures, np.round(scores[order] * 1e6)]), axis=1, return_inverse=True)[1].ravel()
        neighbours = self._neighbours()
        order = order[(rank_within(ties) < _MAX_TIES) | np.isin(rows[order], neighbours)]
        first = rank_within(self._table.structure[rows[order]]) < _SHORTLISTED_PER_STRUCTURE
        first[:_SHORTLISTED] = True
        measured = np.isin(rows[order], self.residuals.points.row)
        first |= np.isin(rows[order], neighbours)
        chosen = order[first | (measured & (np.cumsum(measured) <= _SHORTLISTED_MEASURED))]
        return self.unused(rows[chosen], spread_sizes(edge[chosen]))

    def _neighbours(self) -> Numbers:
        """Return rows that differ in a single knob, whose effect the formula may miss, from the best lineages."""
        count = len(self.measured.row)
        order = descending(self.residuals.posterior_means[:count])
        best = list(dict.fromkeys(self.measured.row[order].tolist()))[:_NEIGHBOURED]
        return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *map(self._table.neighbours, best)]))

    def unused(self, rows: Numbers, wanted: Numbers) -> tuple[Numbers, Numbers]:
        """Return the distinct permitted rows and unused micro-batches nearest to the wanted ones, shape (n, k)."""
        below = np.minimum(self._runs.smallest_too_large[rows], self._largest + 1)
        return self._unused.nearest(rows, wanted, below=below, edges=self.all_edges)

    def refined(self, rows: Numbers, sizes: Numbers, value: Numbers) -> tuple[Numbers, Numbers]:
        """Return more micro-batches around the largest acquisition values, each of a different lineage."""
        order = descending(value)
        chosen = order[rank_within(rows[order]) == 0][:_REFINED]
        fine = np.outer(sizes[chosen], _FINE)
        return self.unused(rows[chosen], np.concatenate([fine, fine // 8 * 8, fine // 64 * 64], axis=1))

    def predict(self, rows: Numbers, sizes: Numbers) -> list[Prediction]:
        """Return the prediction for each configuration."""
        problem = self._problem
        peak, fits = self._runs.fits(rows, sizes)
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

    def joint(self, rows: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
        """Return posterior mean (n,) and covariance (n, n) of the log objectives of n configurations."""
        peak, _ = self._runs.fits(rows, sizes)
        return self.residuals.joint(self._points(rows, sizes.astype(np.float64), self._share(peak)))

    def acquisition(self, rows: Numbers, sizes: Numbers, *, over: float | None = None) -> Acquisition:
        """Return the acquisition function at configurations, over the incumbent or another log objective."""
        peak, fits = self._runs.fits(rows, sizes)
        new = self._points(rows, sizes.astype(np.float64), self._share(peak))
        mean, variance = self.residuals.predict(new)
        mean = self._at_least_as_fast(rows, sizes, mean)
        if over is None:
            over = self.incumbent
        if over is None:
            over = float((mean + np.log(fits + 1e-9)).max(initial=-np.inf)) - _INITIAL_IMPROVEMENT
        penalised = mean - _NON_DEFAULT_PENALTY * self._table.non_default_knobs[rows] - _LARGER_PENALTY * np.log2(sizes)
        learnt_sd = learnt_spread(variance, self.residuals.noise_variance)
        continues = self._table.continues(rows, self._observations)
        if continues.any():
            learnt_sd[continues] = self.residuals.change_within(self._observations.waiting, new.take(continues))
        gain = expected_improvement(penalised - over, learnt_sd)
        seldom, unknown = self.seldom(rows, sizes), self._table.never_measured(rows, self.measured.row)
        unknown &= (penalised - over > -_DOUBTED_DEFICIT) & (seldom == 1)
        gain = np.where(unknown, heavy_tailed_improvement(penalised - over, learnt_sd), gain) * seldom
        run_s = self._launch_s(new.latency, start_s=np.where(continues, _ORDER_S, self._start_up_s))
        fits = fits * self._runs.is_sound(rows, sizes)
        if self.incumbent is not None:
            gain = gain * (fits >= _MIN_FITS)
        cost_s = fits * run_s + (1 - fits) * self._start_up_s
        return Acquisition(
            over=over,
            start_s=self._start_up_s,
            continues=continues,
            gain=fits * gain,
            log_objective=mean,
            spread=np.sqrt(variance),
            fits=fits,
            cost_s=cost_s,
        )

    def _launch_s(self, latency: Numbers, *, start_s: Numbers | None = None) -> Numbers:
        """Return the cost of trials with these step seconds: the steps, and a start (weighted, None for a launch's)."""
        result: Numbers = self._problem.profile_steps * latency + (self._start_up_s if start_s is None else start_s)
        return result

    def relative_costs(self, acquisition: Acquisition) -> Numbers:
        """Return launches' cost over the shortest of the best configurations; 0 before one was measured.

        The best configurations are within ``LEAST_GAIN`` of the best, or within the noise if launches differ by more.
        """
        if self.incumbent is None:
            return np.zeros(len(acquisition.cost_s))
        means = self.residuals.posterior_means[self.rivals]
        margin = max(math.log1p(LEAST_GAIN), math.sqrt(self.residuals.noise_variance))
        near = self.rivals[means >= means.max() - margin]
        usual_s = float(self._launch_s(self.residuals.points.latency[near]).min())
        result: Numbers = acquisition.cost_s / usual_s
        return result

    def is_dear(self, acquisition: Acquisition) -> Numbers:
        """Return a mask of launches that take over ``_DEAR`` times as long as the baseline without a matching gain.

        A launch that takes k times ``_DEAR`` as long as the baseline's micro-batch must be expected to gain k times
        ``LEAST_GAIN``. All False before a metric was measured.
        """
        measured = self.measured
        asked = self._problem.is_asked(measured.micro_batch, measured.accumulation)
        alike = np.flatnonzero(asked & (measured.micro_batch >= self._problem.user_micro_batch))
        if not len(alike):
            return np.zeros(len(acquisition.cost_s), dtype=bool)
        shortest_s = float(self._launch_s(self.residuals.points.latency[alike]).min())
        matching = np.maximum(1.0, acquisition.gain / math.log1p(LEAST_GAIN))
        result: Numbers = acquisition.cost_s > _DEAR * shortest_s * matching
        return result

    def prospects(self, rows: Numbers, sizes: Numbers) -> Prospects | None:
        """Return the possible gain over the incumbent by promising and by all measured configs; None without any."""
        if self.incumbent is None:
            return None
        peak, fits = self._runs.fits(rows, sizes)
        fits = fits * self._runs.is_sound(rows, sizes) * self.seldom(rows, sizes)
        new = self._points(rows, sizes.astype(np.float64), self._share(peak))
        mean, variance = self.residuals.predict(new)
        hopeful = descending(mean + _HOPE_SIGMAS * np.sqrt(variance) + np.log(fits + 1e-9))[:_HOPEFUL]
        points = new.take(hopeful).joined(self.residuals.points.take(self.rivals))
        return Prospects(
            *self.residuals.joint(points),
            index=hopeful,
            runs=fits[hopeful],
            held=len(hopeful) + int(np.argmax(self.residuals.posterior_means[self.rivals])),
            noise_variance=self.residuals.noise_variance,
        )
