"""Choose the next launch of a guided search from a posterior over memory use and step time.

``optuna_dsat.cost.memory_posterior`` predicts memory, ``optuna_dsat.cost.step_time`` the step time, and
``optuna_dsat.guided.residual_gp`` the error of the step-time formula in the metric. A measurement corrects the
prediction of its lineage most, of its structure less, and of other structures as far as the formula relates them.
``optuna_dsat.guided.prior_knowledge`` contains measurements of earlier studies.

The next launch has the largest expected improvement (Jones et al. 1998) per cost in seconds (Snoek et al. 2012)::

    P(fits) EI / (P(fits) T_run + (1 - P(fits)) T_failed)

EI is the expected improvement of the metric's logarithm over the best posterior mean so far, by the change of the
launch's posterior mean: noise limits the information of a launch (the knowledge gradient of Frazier et al. 2009, for a
single configuration). ``T_run`` is the duration of start-up and profile steps, ``T_failed`` the duration of start-up;
both are estimated from the launches so far. A launch that takes ten times as long must be expected to gain ten times as
much. ZeRO 3, offloads and values of flags that were never measured have heavy-tailed errors
(``optuna_dsat.guided.acquisition``), because a formula that does not hold is off by much, but by less than a factor
of two.

Micro-batches are limited in three ways. They are at most ``problem.REACH`` times the largest that ran. They do not
exceed a size at which a doubling gained less than ``LEAST_GAIN`` (``sizes.paying_sizes``). They do not take many times
as long as the baseline unless they are expected to gain as much (``Posterior.is_dear``).

The search ends under either of two conditions:

- No configuration has an expected improvement of at least ``min_gain`` per launch (as in Jones et al. 1998), where a
  launch is as long as the shortest of the best configurations, and short ones of configurations of measured structures
  that are predicted to be slow do not need less; and ``_TOGETHER`` launches together are not expected to gain
  ``min_gain`` each (``Prospects.worth_of_launches``). With noise, a single launch provides little information but many
  together provide much.
- The remaining gain is, with 90% probability, below the noise between launches of a configuration (``remaining``), so
  that resolving it needs more launches than it is worth.

Before it ends, it looks around the best configuration for exceptions from the posterior (``order.last_check``).

If no single launch is worth its cost, long launches are skipped.

A structure that was never measured waits for simpler ones that are predicted to be about as fast, and settings are
refined once the structures that may win were measured (``optuna_dsat.guided.order``). If it is simpler than a measured
one, it is expected to be as fast at the same micro-batch (``sizes.raised_means``). A launch for a micro-batch near the
edge of memory starts below it and climbs (``start_of_climb``). Each candidate has a reason in words
(``optuna_dsat.guided.order``).

A launch whose ranks wait for another trial measures configurations that differ in live settings only
(``optuna_dsat.config.knobs``) without a start, and with less noise relative to its earlier measurements. Such a
configuration costs its steps only; if it fails, the start of another launch. So settings are compared within a launch
while that is worth most per second, and sizes near the edge of memory come last.

Running launches count as if measured at their predicted metric (the "kriging believer" of Ginsbourger et al. 2010), and
no other launch of their lineages is proposed.

Decisions depend only on the finished and pending trials; the state kept between decisions is determined by the space
and the profile.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION
from optuna_dsat.cost.memory import estimate
from optuna_dsat.cost.numbers import Numbers, descending
from optuna_dsat.cost.step_time import ERROR, LogCoefficients
from optuna_dsat.guided.acquisition import Acquisition, Prediction, Prospects
from optuna_dsat.guided.candidates import Observations
from optuna_dsat.guided.order import DEFICIT, GAIN_OF_CHECK, first_launched, last_check, reason_of, start_of_climb
from optuna_dsat.guided.posterior import DOUBTED_FORMULA, Posterior
from optuna_dsat.guided.problem import Problem
from optuna_dsat.guided.run_probability import memory_posterior
from optuna_dsat.trials import attributes
from optuna_dsat.trials.failures import structure_failures
from optuna_dsat.trials.lineage import MICRO_BATCH, agrees, lineage_key

_TOGETHER = 20
"""Number of launches that are evaluated together if no single launch is worth its cost."""
_UNRESOLVED = 1.0
"""Standard deviations of the noise by which the stated remaining gain exceeds the posterior's. Calibrated on realistic
machines: nine in ten statements are then true (``python -m benchmarks.search_efficiency``).
"""
_LONG = 2.0
"""Duration relative to a launch of the best configuration above which a launch must be worth its cost alone."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration proposed for launch."""

    params: Mapping[str, Any]
    """The knobs, without the micro-batch."""
    micro_batch: int
    largest: int
    """Largest shortlisted micro-batch of the lineage."""
    value: float
    """Expected metric."""
    reason: str
    """Why it is proposed."""


class GuidedPlanner:
    """Decides what to launch next, until the expected relative gain per launch is below ``min_gain``."""

    def __init__(self, problem: Problem, *, min_gain: float = 0.0) -> None:
        self.problem = problem
        self.min_gain = min_gain
        self._cached: tuple[Hashable, Candidate | None] | None = None
        """Key and result of the last call: a tuner first asks whether a candidate exists, then for the candidate."""
        self._latest: tuple[Sequence[FrozenTrial], Hashable, Posterior, Observations] | None = None
        """The last trials, which a decision asks for several times; the key of their observations, which are equal from
        the end of a trial to the end of another; the posterior and the observations.
        """

    def next(self, trials: Sequence[FrozenTrial], fixed: Mapping[str, Any] = MappingProxyType({})) -> Candidate | None:
        """Return the configuration to launch next, None if the search is over."""
        posterior, observations = self._searched(trials)
        avoided = structure_failures(trials).avoided
        key = (posterior, lineage_key(fixed, micro_batch=""), repr(avoided))
        if self._cached is None or self._cached[0] != key:
            open_rows = self._open_rows(observations, fixed, avoided)
            self._cached = key, self._choose(posterior, open_rows, climbs=observations.climbs)
        return self._cached[1]

    def draw(
        self,
        trials: Sequence[FrozenTrial],
        rng: random.Random,
        *,
        fixed: Mapping[str, Any] = MappingProxyType({}),
        hopeless: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[Mapping[str, Any], int] | None:
        """Draw a lineage without trials with the probability that it contains the best configuration (Thompson 1933).

        Return it with its micro-batch, None if none is left; before a metric was measured, that of the largest
        acquisition value. ``hopeless`` structures (partial knobs) are drawn last.
        """
        posterior, observations = self._searched(trials)
        for avoided in (hopeless, ()):
            rows = self._open_rows(observations, fixed, avoided)
            rows, sizes = posterior.shortlist(rows[~np.isin(rows, list(observations.used))])
            if not len(rows):
                continue
            acquisition = posterior.acquisition(rows, sizes)
            worth = np.flatnonzero((sizes <= posterior.paying_sizes(rows)) & ~posterior.is_dear(acquisition))
            if len(worth):
                rows, sizes, acquisition = rows[worth], sizes[worth], acquisition.take(worth)
            prospects = posterior.prospects(rows, sizes)
            best = int(descending(acquisition.value)[0]) if prospects is None else prospects.draw(rng)
            return self.problem.table.lineages[int(rows[best])], int(sizes[best])
        return None

    def largest_fit(self, trials: Sequence[FrozenTrial], params: Mapping[str, Any]) -> int | None:
        """Return the largest micro-batch of a lineage expected to fit; None outside this space."""
        row = self.problem.table.row_index(params)
        return None if row is None else int(self._searched(trials)[0].all_edges[row])

    def largest_worth(self, trials: Sequence[FrozenTrial], params: Mapping[str, Any]) -> int | None:
        """Return the largest micro-batch of a lineage worth a launch if it fits; None outside this space."""
        row = self.problem.table.row_index(params)
        return None if row is None else self._searched(trials)[0].largest_worth(row)

    def _searched(self, trials: Sequence[FrozenTrial]) -> tuple[Posterior, Observations]:
        """Return the posterior of a search within the bounds of its dataset, and the observations of its trials."""
        if self._latest is None or self._latest[0] is not trials:
            observations = self.problem.table.observations_of_trials(trials)
            samples = attributes.data_limit([trial for trial in trials if trial.state.is_finished()])
            key = observations.digest(), samples
            if self._latest is not None and self._latest[1] == key:
                posterior = self._latest[2]
            else:
                posterior = Posterior(self.problem, observations, samples_limit=samples)
            self._latest = trials, key, posterior, observations
        return self._latest[2:]

    def fitted_coefficients(self, trials: Sequence[FrozenTrial]) -> LogCoefficients:
        """Return the coefficients of the step-time model fitted to these trials."""
        return self._posterior(trials, formula_error=ERROR).fitted

    def posterior_means(self, trials: Sequence[FrozenTrial]) -> dict[int, float]:
        """Return the posterior mean metric of measured trials: trial number -> metric.

        The mean is between the noisy measurement and the prediction from all other trials, so that among configurations
        of similar speed the luckiest measurement does not count as the best.
        """
        posterior = self._posterior(trials)
        return {
            int(number): self.problem.metric_of(float(log_objective))
            for number, log_objective in zip(
                posterior.measured.number, posterior.residuals.posterior_means, strict=False
            )
        }

    def joint_posterior(
        self, trials: Sequence[FrozenTrial], numbers: Sequence[int]
    ) -> tuple[list[int], Numbers, Numbers]:
        """Return the noiseless joint posterior of log objectives: n trial numbers, means (n,), covariance (n, n)."""
        posterior = self._posterior(trials)
        known = [int(number) for number in posterior.measured.number]
        parts = [number for number in numbers if number in known]
        index = np.array([known.index(number) for number in parts], dtype=np.int64)
        return parts, *posterior.residuals.joint(posterior.residuals.points.take(index))

    def predict(
        self, trials: Sequence[FrozenTrial], configurations: Sequence[tuple[Mapping[str, Any], int]]
    ) -> list[Prediction | None]:
        """Return a prediction per configuration given some trials; None for one outside this space."""
        queried = [(self.problem.table.row_index(params), size) for params, size in configurations]
        inside = [(row, size) for row, size in queried if row is not None]
        if not inside:
            return [None] * len(queried)
        rows, sizes = (np.array(column, dtype=np.int64) for column in zip(*inside, strict=True))
        predictions = iter(self._posterior(trials, formula_error=ERROR).predict(rows, sizes))
        return [None if row is None else next(predictions) for row, _ in queried]

    def log_ratio(
        self,
        trials: Sequence[FrozenTrial],
        configuration: tuple[Mapping[str, Any], int],
        other: tuple[Mapping[str, Any], int],
    ) -> tuple[float, float]:
        """Return the log ratio of a configuration's objective to another's, and its standard deviation.

        The formula's error is assumed to be ``DOUBTED_FORMULA`` for each, which a fit to few launches underestimates.

        Raises:
            ValueError: If one of them is not in this space.
        """
        rows = [self.problem.table.row_index(params) for params, _ in (configuration, other)]
        if None in rows:
            raise ValueError(f"{configuration} or {other} is not in this space")
        sizes = np.array([size for _, size in (configuration, other)], dtype=np.int64)
        means, covariance = self._posterior(trials, formula_error=ERROR).joint(np.array(rows, dtype=np.int64), sizes)
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        return float(means[0] - means[1]), math.sqrt(max(0.0, float(variance)) + 2 * DOUBTED_FORMULA**2)

    def noise(self, trials: Sequence[FrozenTrial]) -> float:
        """Return the most likely relative standard deviation between launches."""
        return math.sqrt(self._searched(trials)[0].residuals.noise_variance)

    def expected_peak(self, trials: Sequence[FrozenTrial], params: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """Return a rank's expected peak in bytes; without ``params``, outside the space, by the formula alone."""
        size = int(config[MICRO_BATCH])
        lineage = {name: value for name, value in params.items() if name != GRADIENT_ACCUMULATION}
        row = self.problem.table.row_index(lineage) if lineage else None
        if row is None:
            hardware = self.problem.hardware
            return estimate(self.problem.profile, config, micro_batch=size, hardware=hardware).device_bytes
        memory = memory_posterior(self.problem, self.problem.table.observations_of_trials(trials))
        inputs = self.problem.table.memory_inputs(np.array([row]), np.array([size]))
        return round(float(memory.predict(inputs)[0][0]))

    def formula(
        self, trials: Sequence[FrozenTrial], configurations: Sequence[tuple[Mapping[str, Any], int]]
    ) -> list[float] | None:
        """Return the metric by the step-time formula fitted to the trials, without residuals; None outside."""
        rows = [self.problem.table.row_index(params) for params, _ in configurations]
        if None in rows:
            return None
        sizes = np.array([size for _, size in configurations], dtype=np.float64)
        posterior = self._posterior(trials, formula_error=ERROR)
        result = posterior.formula_log_objective(np.array(rows, dtype=np.int64), sizes)
        return [self.problem.metric_of(float(item)) for item in result]

    def _posterior(self, trials: Sequence[FrozenTrial], *, formula_error: float = DOUBTED_FORMULA) -> Posterior:
        observations = self.problem.table.observations_of_trials(trials)
        return Posterior(self.problem, observations, samples_limit=None, formula_error=formula_error)

    def _choose(self, posterior: Posterior, open_rows: Numbers, *, climbs: bool) -> Candidate | None:
        rows, sizes, acquisition = self._evaluated(posterior, open_rows)
        if not len(rows):
            return None
        rows, sizes, acquisition = self._worth_launching(posterior, rows, sizes, acquisition)
        checks, chosen = "", 0
        if not len(rows) or not acquisition.value.max() > 0:
            check = last_check(self.problem.table, posterior, open_rows)
            if check is None:
                return None
            rows, sizes, acquisition, checks = check
            if posterior.relative_costs(acquisition)[0] * self.min_gain > GAIN_OF_CHECK:
                return None
        else:
            chosen = first_launched(self.problem.table, posterior, rows, sizes, acquisition)
        best = start_of_climb(rows, sizes, acquisition, chosen) if climbs else chosen
        row = int(rows[best])
        return Candidate(
            params=self.problem.table.lineages[row],
            micro_batch=int(sizes[best]),
            largest=int(sizes[rows == row].max()),
            value=self.problem.metric_of(float(acquisition.log_objective[best])),
            reason=reason_of(
                self.problem.table,
                posterior,
                row,
                int(sizes[best]),
                log_objective=float(acquisition.log_objective[best]),
                fits=float(acquisition.fits[best]),
                climbs=best != chosen,
                checks=checks,
            ),
        )

    def _worth_launching(
        self, posterior: Posterior, rows: Numbers, sizes: Numbers, acquisition: Acquisition
    ) -> tuple[Numbers, Numbers, Acquisition]:
        """Return the configurations worth a launch, alone or together with others; empty if the search is over."""
        pays = sizes <= posterior.paying_sizes(rows)
        rows, sizes, acquisition = rows[pays], sizes[pays], acquisition.take(pays)
        relative = posterior.relative_costs(acquisition)
        short = relative <= _LONG
        paying = short | ~posterior.is_dear(acquisition)
        known = np.isin(self.problem.table.structure[rows], posterior.known_structures)
        slow = known & (acquisition.log_objective < acquisition.over - DEFICIT)
        worth = paying & (acquisition.gain >= self.min_gain * np.where(slow, np.maximum(1.0, relative), relative))
        if worth.any():  # slow ones come last (``first_launched``), after launches that may be worth less
            allowed = worth if slow[worth].all() else paying
            return rows[allowed], sizes[allowed], acquisition.take(allowed)
        rows, sizes, acquisition = rows[short], sizes[short], acquisition.take(short)
        if not len(rows) or not self._goes_on(posterior.prospects(rows, sizes)):
            return rows[:0], sizes[:0], acquisition.take(np.arange(0))
        return rows, sizes, acquisition

    def _goes_on(self, prospects: Prospects | None) -> bool:
        """Return whether several launches together are worth their cost, though no single launch is."""
        if prospects is None:
            return True
        enough = prospects.worth_of_launches(_TOGETHER) >= _TOGETHER * self.min_gain
        return enough and prospects.remaining() >= math.sqrt(prospects.noise_variance)

    def remaining(self, trials: Sequence[FrozenTrial]) -> float:
        """Return the remaining gain: the best configuration is better by less than this share with 90% probability.

        It is the posterior's 90% quantile given these trials, plus ``_UNRESOLVED`` standard deviations between
        launches: the posterior is too sure of differences below the noise. Infinite before a metric was measured.
        """
        posterior, observations = self._searched(trials)
        open_rows = self._open_rows(observations, {}, structure_failures(trials).avoided)
        rows, sizes, _ = self._evaluated(posterior, open_rows)
        if not len(rows):
            return 0.0
        prospects = posterior.prospects(rows, sizes)
        if prospects is None:
            return math.inf
        return math.expm1(prospects.remaining() + _UNRESOLVED * math.sqrt(prospects.noise_variance))

    @staticmethod
    def _evaluated(posterior: Posterior, rows: Numbers) -> tuple[Numbers, Numbers, Acquisition]:
        """Return the shortlisted and refined configurations of rows, with the acquisition function at each."""
        rows, sizes = posterior.shortlist(rows)
        acquisition = posterior.acquisition(rows, sizes)
        more = posterior.refined(rows, sizes, acquisition.value)
        result = acquisition.joined(posterior.acquisition(*more, over=acquisition.over))
        return np.concatenate([rows, more[0]]), np.concatenate([sizes, more[1]]), result

    def _open_rows(
        self, observations: Observations, fixed: Mapping[str, Any], avoided: Sequence[Mapping[str, Any]]
    ) -> Numbers:
        """Return the rows that may be launched: not broken, avoided, running, or too large for the host."""
        free = np.ones(len(self.problem.table.lineages), dtype=bool)
        closed = observations.pending | observations.broken | observations.host_out_of_memory
        free[observations.row[closed]] = False
        for record in avoided:
            free &= [not agrees(params, record, strict=True) for params in self.problem.table.lineages]
        names = {tuned.name for tuned in self.problem.space.knobs}
        held = {name: value for name, value in fixed.items() if name in names}
        rows = np.flatnonzero(free)
        if not held:
            return rows
        return rows[[agrees(self.problem.table.lineages[row], held, strict=True) for row in rows]]
