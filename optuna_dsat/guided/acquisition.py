"""Acquisition function, expected improvements in closed form, predictions, and the gain that may be left."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optuna_dsat.cost.memory_posterior import normal_cdf
from optuna_dsat.cost.numbers import Numbers, descending, without_rounding_error


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Posterior of a configuration."""

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
    """Acquisition function at n configurations; arrays have length n."""

    over: float
    """Log objective of the incumbent, the reference of gains."""
    start_s: float
    """Seconds of a start."""
    continues: Numbers
    """Whether the ranks that wait for another trial can measure it."""
    gain: Numbers
    """Expected improvement, in the metric's logarithm."""
    log_objective: Numbers
    """Posterior mean log objective: log of the metric, of its inverse if the metric is minimized."""
    spread: Numbers
    """Standard deviation of the log objective, without noise."""
    fits: Numbers
    """Probability that the configuration runs."""
    cost_s: Numbers
    """Expected seconds of the launch."""

    @property
    def chance(self) -> Numbers:
        """Probability of the configuration to exceed the incumbent if it runs."""
        return normal_cdf((self.log_objective - self.over) / self.spread)

    @property
    def value(self) -> Numbers:
        """Expected improvement per second."""
        result: Numbers = self.gain / self.cost_s
        return result

    @property
    def value_of_starts(self) -> Numbers:
        """Expected improvement per second if no configuration costs less than a start."""
        result: Numbers = self.gain / np.maximum(self.cost_s, self.start_s)
        return result

    def take(self, index: Numbers) -> Acquisition:
        """Return the values selected by an index array or a mask."""
        taken: dict[str, Any] = {name: getattr(self, name)[index] for name in _ARRAYS}
        return replace(self, **taken)

    def joined(self, other: Acquisition) -> Acquisition:
        """Return these values followed by other values with the same reference."""
        both: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _ARRAYS}
        return replace(self, **both)


_ARRAYS = ("continues", "gain", "log_objective", "spread", "fits", "cost_s")


def heavy_tailed_improvement(mean: Numbers, sd: Numbers) -> Numbers:
    """Return the expected improvement over 0 if errors follow Student's t with 3 degrees of freedom and scale ``sd``.

    Used for knob values and structures never measured: a formula that does not hold is off by more than a normal error.
    The closed form is from Tracey and Wolpert 2018, "Upgrading from Gaussian Processes to Student's-T Processes".
    """
    u = mean / sd
    density = 6 * math.sqrt(3) / (math.pi * (3 + u**2) ** 2)
    below = 0.5 + (u / math.sqrt(3) / (1 + u**2 / 3) + np.arctan(u / math.sqrt(3))) / math.pi
    result: Numbers = mean * below + sd * (3 + u**2) / 2 * density
    return np.maximum(result, 0.0)


def learnt_spread(variance: Numbers, noise_variance: float) -> Numbers:
    """Return the standard deviations of the change of posterior means by a measurement (Frazier et al. 2009).

    Without noise it is the posterior standard deviation; a measurement that is mostly noise adds little information.
    """
    result: Numbers = variance / np.sqrt(variance + noise_variance)
    return result


def expected_improvement(gain: Numbers, spread: Numbers) -> Numbers:
    """Return ``E[max(0, X)]`` for X normal with these means and standard deviations."""
    z = gain / spread
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    result: Numbers = np.maximum(0.0, gain * normal_cdf(z) + spread * density)
    return result


_DRAWS, _SURE = 256, 0.9
"""Draws of the joint posterior, and the quantile of the remaining gain."""


class Prospects:
    """Possible gain over the incumbent (index ``held``), in the metric's logarithm.

    ``means`` and ``covariance``, shape (n, n), are of the log objectives of n configurations, unmeasured first, without
    noise; ``runs`` is each unmeasured one's probability to run (at the edge of memory they run or fail together),
    ``index`` its index as ``draw`` returns it; ``noise_variance`` is of a measurement.
    """

    def __init__(
        self,
        means: Numbers,
        covariance: Numbers,
        *,
        runs: Numbers,
        held: int,
        noise_variance: float,
        index: Numbers | None = None,
    ) -> None:
        self._means, self._covariance, self._held = means, covariance, held
        self.noise_variance = noise_variance
        self._unmeasured = len(runs)
        self._index = np.arange(len(runs)) if index is None else index
        values, vectors = np.linalg.eigh(covariance)
        normal = np.random.default_rng(0).standard_normal((_DRAWS, len(means)))
        root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T  # symmetric: no matter which eigenvectors
        self._draws = without_rounding_error(means + normal @ root)
        chances = np.concatenate([runs, np.ones(len(means) - len(runs))])
        self._runs = chances > np.random.default_rng(1).random((_DRAWS, 1))

    def remaining(self) -> float:
        """Return the 90% quantile of the best configuration's gain."""
        gain = np.where(self._runs, self._draws - self._draws[:, [self._held]], 0.0)
        return float(np.quantile(gain.max(axis=1), _SURE))

    def draw(self, rng: random.Random) -> int:
        """Return the index of the best unmeasured configuration of a random draw."""
        number = rng.randrange(_DRAWS)
        hopes = self._draws[number] - 1e3 * ~self._runs[number]
        return int(self._index[np.argmax(hopes[: self._unmeasured])])

    def worth_of_launches(self, launches: int) -> float:
        """Return the expected gain of some launches together.

        Each launch runs the best configuration of a draw (parallel Thompson sampling, Kandasamy et al. 2018) and is
        measured with noise. The new incumbent has the best posterior mean (the knowledge gradient of a batch, Wu and
        Frazier 2016).
        """
        hopes = np.where(self._runs, self._draws, -np.inf)[:, : self._unmeasured]
        best = descending(hopes)[:, :launches].T.ravel()
        chosen = np.array(list(dict.fromkeys(best.tolist()))[:launches], dtype=np.int64)
        shared = self._covariance[chosen]
        learnt = np.linalg.solve(shared[:, chosen] + self.noise_variance * np.eye(len(chosen)), shared)
        errors = np.random.default_rng(2).standard_normal((_DRAWS, len(chosen))) * math.sqrt(self.noise_variance)
        means = self._means + (self._draws[:, chosen] + errors - self._means[chosen]) @ learnt
        known = np.arange(len(means[0])) >= self._unmeasured
        known[chosen] = True
        result = np.where(self._runs & known, means, -np.inf).max(axis=1)
        return float(result.mean() - self._means[self._held])
