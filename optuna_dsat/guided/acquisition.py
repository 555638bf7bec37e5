"""Values of the acquisition function, expected improvements in closed form, and predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from optuna_dsat.cost.memory_posterior import normal_cdf
from optuna_dsat.cost.numbers import Numbers

__all__ = ["Acquisition", "Prediction", "expected_improvement", "heavy_tailed_improvement", "learnt_spread"]


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

    value: Numbers
    """Acquisition value: the next launch maximizes it."""
    gain: Numbers
    """Expected improvement, in the metric's logarithm."""
    log_objective: Numbers
    """Posterior mean log objective: log of the metric, of its inverse if the metric is minimized."""
    fits: Numbers
    """Probability that the configuration runs."""
    cost_s: Numbers
    """Expected seconds of the launch."""

    def take(self, index: Numbers) -> Acquisition:
        """Return the values selected by an index array or a mask."""
        names = (field_.name for field_ in fields(self) if field_.name != "over")
        return Acquisition(over=self.over, **{name: getattr(self, name)[index] for name in names})

    def joined(self, other: Acquisition) -> Acquisition:
        """Return these values followed by other values with the same reference."""
        names = (field_.name for field_ in fields(self) if field_.name != "over")
        both = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names}
        return Acquisition(over=self.over, **both)


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
