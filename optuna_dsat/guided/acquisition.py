"""Values of the acquisition function, expected improvements in closed form, and predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optuna_dsat.cost.memory_posterior import normal_cdf
from optuna_dsat.cost.numbers import Numbers


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
