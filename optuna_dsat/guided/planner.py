"""What every configuration of a space promises after some launches, and which one to launch next.

Memory is foreseen by ``optuna_dsat.cost.memory_posterior``, the time of a step by ``optuna_dsat.cost.step_time``, and
what its formula misses of the metric by ``optuna_dsat.guided.residual_gp``. So a measured point pulls its own lineage
towards it, its structure a good deal, the others as far as the formula says. ``optuna_dsat.guided.prior_knowledge``
is what earlier studies taught.

The next launch has the largest expected improvement (Jones et al. 1998) for its seconds (Snoek et al. 2012)::

    P(fits)^2 EI / sqrt(P(fits) T_run + (1 - P(fits)) T_failed)

with EI the expected gain of the metric's logarithm over what is believed to be the best so far, ``T_run`` the start and
the profile steps, and ``T_failed`` the start alone; what a start takes is learnt from the launches so far. The root
tempers the cost: divided by all of it, what is left late in a search goes to cheap small micro-batches that cannot win
(Lee et al. 2020, arXiv:2003.10870, cool it, too). Where no configuration promises a gain worth having any more, the
search is over (as in Jones et al. 1998).

Launches in flight count as if measured as foreseen (the "kriging believer" of Ginsbourger et al. 2010), and their
lineages are left alone.

All of it follows from the finished and pending trials: nothing is kept but what the space and the profile determine.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from optuna.trial import FrozenTrial

from optuna_dsat.cost.step_time import Fitted
from optuna_dsat.guided.candidates import Known
from optuna_dsat.guided.posterior import Expected, Posterior
from optuna_dsat.guided.problem import Problem
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import agrees, lineage_key

__all__ = ["Candidate", "GuidedPlanner"]

Numbers: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Candidate:
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


class GuidedPlanner:
    """Decides which configuration to launch next.

    Args:
        problem: Model, machine, space and metric.
        min_gain: Relative improvement of the metric that some configuration must be expected to bring to be launched.

    Raises:
        ValueError: If the least gain is negative.
    """

    def __init__(self, problem: Problem, *, min_gain: float = 0.0) -> None:
        if min_gain < 0:
            raise ValueError(f"min_gain must not be negative, as {min_gain} is: with 0 all that may win is tried")
        self.problem = problem
        self.min_gain = min_gain
        self._answered: tuple[Hashable, Candidate | None] | None = None
        """The last question and its answer: a tuner asks first whether anything is left, then what it is."""

    def next(self, trials: Sequence[FrozenTrial], fixed: Mapping[str, Any] = MappingProxyType({})) -> Candidate | None:
        """Return the configuration to launch next, None where none is left.

        Args:
            trials: The study's trials, without the one that asks.
            fixed: Knobs that the trial has already.
        """
        known = self.problem.table.read(trials)
        samples = attributes.data_limit([trial for trial in trials if trial.state.is_finished()])
        question = (known.digest(), samples, lineage_key(fixed, micro_batch=""))
        if self._answered is None or self._answered[0] != question:
            self._answered = question, self._choose(known, samples, fixed)
        return self._answered[1]

    def learnt(self, trials: Sequence[FrozenTrial]) -> Fitted:
        """Return the coefficients of the step theory as these trials have them."""
        return self._posterior(trials).fitted

    def posterior_means(self, trials: Sequence[FrozenTrial]) -> dict[int, float]:
        """Return for measured trials what their metric is believed to be: trial number -> metric.

        It lies between the measurement, which is noisy, and what all others make expected of the configuration; so
        of several about as good, the luckiest is not taken for the best.
        """
        posterior = self._posterior(trials)
        return {
            int(number): self.problem.metric_of(float(log_objective))
            for number, log_objective in zip(posterior.ran.number, posterior.residuals.posterior_means, strict=False)
        }

    def expect(
        self, trials: Sequence[FrozenTrial], configurations: Sequence[tuple[Mapping[str, Any], int]]
    ) -> list[Expected | None]:
        """Return what is believed of configurations after some trials.

        Args:
            trials: The study's trials.
            configurations: Knobs and micro-batch of each.

        Returns:
            None for a configuration that is not of this space.
        """
        places = [(self.problem.table.row_of(params), size) for params, size in configurations]
        known = [(row, size) for row, size in places if row is not None]
        if not known:
            return [None] * len(places)
        rows, sizes = (np.array(column, dtype=np.int64) for column in zip(*known, strict=True))
        found = iter(self._posterior(trials).expect(rows, sizes))
        return [None if row is None else next(found) for row, _ in places]

    def rate_ratio(
        self, trials: Sequence[FrozenTrial], row: int, micro_batch: int, *, larger_batch: int = 1, more_steps: int = 1
    ) -> float:
        """Return how many times the samples per second a change is expected to bring, were memory no matter.

        Args:
            trials: The study's trials.
            row: Lineage, as a row of ``table``.
            micro_batch: Its micro-batch.
            larger_batch: Factor on the micro-batch.
            more_steps: Factor on the accumulation steps.
        """
        columns, fitted = self.problem.table.columns.take(np.array([row, row])), self.learnt(trials)
        size = np.array([1.0, larger_batch]) * micro_batch
        steps = np.array([1.0, more_steps]) * self.problem.space.accumulation(micro_batch)
        seconds = self.problem.step_time.phases(fitted.mean, columns, size, steps, np.full(2, 0.5)).sum(axis=0)
        rates = size * steps / seconds
        return float(rates[1] / rates[0])

    def _posterior(self, trials: Sequence[FrozenTrial]) -> Posterior:
        return Posterior(self.problem, self.problem.table.read(trials), samples_limit=None)

    def _choose(self, known: Known, samples: int | None, fixed: Mapping[str, Any]) -> Candidate | None:
        rows = self._open(known, fixed)
        posterior = Posterior(self.problem, known, samples_limit=samples)
        rows, sizes = posterior.shortlist(rows)
        if not len(rows):
            return None
        worth = posterior.acquisition(rows, sizes)
        best = int(np.argmax(worth.value))
        if not worth.value[best] > 0 or (posterior.has_measured and worth.gain.max() < self.min_gain):
            return None
        row = int(rows[best])
        return Candidate(
            params=self.problem.table.lineages[row],
            micro_batch=int(sizes[best]),
            largest=int(sizes[rows == row].max()),
            value=self.problem.metric_of(float(worth.log_objective[best])),
            fits=float(worth.fits[best]),
        )

    def _open(self, known: Known, fixed: Mapping[str, Any]) -> Numbers:
        """Return the lineages that may be launched: not broken, not in flight."""
        free = np.ones(len(self.problem.table.lineages), dtype=bool)
        free[known.row[known.pending | known.broken | known.host_too_large]] = False
        names = {tuned.name for tuned in self.problem.space.knobs}
        held = {name: value for name, value in fixed.items() if name in names}
        rows = np.flatnonzero(free)
        if not held:
            return rows
        return rows[[agrees(self.problem.table.lineages[row], held, strict=True) for row in rows]]
