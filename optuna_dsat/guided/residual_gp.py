"""What the step theory misses of the metric, as a Gaussian process with few parts.

Rasmussen and Williams 2006, chapter 2. The residual of a configuration's logarithm is a sum: one part per structure
(ZeRO stage and offload), one per value of a knob within a structure, one per lineage, smooth ones of the share of
memory in use and of the micro-batch (caches, kernels), one of micro-batches that are multiples of 8 (their kernels
differ; NVIDIA, "Matrix Multiplication Background"), and what the coefficients' own uncertainty makes of it, by the
formula's derivatives. All but the last two grow and shrink together, by a factor that measurements choose: how well the
theory does elsewhere says nothing of kernels.

Measurements of an earlier study are noisier than those of this one, and have an error in common: that machine, on that
day.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optuna_dsat.cost.memory_posterior import alike, by_knob, by_structure

__all__ = ["NOISE", "Points", "ResidualGP"]

Numbers: TypeAlias = npt.NDArray[Any]

_STRUCTURE, _KNOBS, _LINEAGE, _FILL, _SIZE, _EIGHTS = 0.05, 0.05, 0.015, 0.03, 0.03, 0.04
"""Standard deviations of the residuals' parts, relative to the metric."""
_SCALES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""Factors on their variances, of which the likeliest is taken."""
_SCALE_SPREAD = 1.5
"""Standard deviation of the factor's logarithm before anything is measured."""
_FILL_WIDTH = 0.2
"""Share of the memory over which the residual of memory in use changes."""
_SIZE_WIDTH = 1.0
"""Doublings of the micro-batch over which the residual of its size changes."""
NOISE = 0.02
"""Of a measured metric, relative, from launch to launch."""
_EARLIER, _EARLIER_EACH = 0.05, 0.02
"""Errors of what an earlier study measured, relative: one that its measurements share, and one of each."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """Configurations as the residuals see them, one element each."""

    row: Numbers
    """Of the lineage table."""
    structure: Numbers
    knobs: Numbers
    micro_batch: Numbers
    fill: Numbers
    """Share of the device's memory in use."""
    log_objective: Numbers
    """By the formula alone."""
    latency: Numbers
    doubt: Numbers
    """Derivatives of the goodness times a root of the coefficients' covariance, (n, k)."""
    earlier: Numbers
    """1 where an earlier study measured it."""

    def take(self, index: Numbers) -> Points:
        """Return some of them."""
        return Points(**{one.name: getattr(self, one.name)[index] for one in fields(self)})


class ResidualGP:
    """The residuals' belief at one moment.

    Args:
        points: What was measured first, then what is in flight.
        shown: Measured goodness, of the first ``len(shown)`` points.
    """

    def __init__(self, points: Points, shown: Numbers) -> None:
        self.points = points
        count = len(shown)
        measured = points.take(np.arange(count))
        self.scale = self._likeliest_scale(measured, shown - measured.log_objective)
        signal = self.covariance(points, points)
        prior = signal + _noise(points)
        self.weights = np.zeros(len(points.row))
        self.weights[:count] = np.linalg.solve(prior[:count, :count], shown - measured.log_objective)
        self._inverse = np.linalg.inv(prior)
        self.posterior_means: Numbers = (points.log_objective + signal @ self.weights)[:count]
        """Expected goodness of what was measured: between the formula and the measurement, noise left out."""

    def _likeliest_scale(self, points: Points, missed: Numbers) -> float:
        """Return the variance of the residuals relative to the assumed one, by what the measured ones make likely.

        The theory may be right to a per cent here and wrong by a tenth there. Type II maximum likelihood (MacKay 2003,
        chapter 28) with a log-normal prior, over a few values.
        """
        found = []
        for scale in _SCALES:
            self.scale = scale
            covariance = self.covariance(points, points) + _noise(points)
            fit = missed @ np.linalg.solve(covariance, missed) + np.linalg.slogdet(covariance)[1]
            found.append(-0.5 * fit - 0.5 * math.log(scale) ** 2 / _SCALE_SPREAD**2)
        return _SCALES[int(np.argmax(found))]

    @property
    def apart(self) -> float:
        """Variance of a structure's part, before the factor that all parts share.

        Never less than assumed: launches of one structure that agree with the theory say nothing of another.
        """
        return _STRUCTURE**2 / min(1.0, self.scale)

    def covariance(self, a: Points, b: Points) -> Numbers:
        """Return the covariance of the goodness of two sets of configurations, noise aside."""
        same = a.structure[:, None] == b.structure[None, :]
        found: Numbers = same * (self.apart + _KNOBS**2 * alike(a.knobs, b.knobs))
        found += _LINEAGE**2 * (a.row[:, None] == b.row[None, :])
        found += _FILL**2 * np.exp(-0.5 * ((a.fill[:, None] - b.fill[None, :]) / _FILL_WIDTH) ** 2)
        sizes = np.log2(a.micro_batch)[:, None] - np.log2(b.micro_batch)[None, :]
        found += _SIZE**2 * np.exp(-0.5 * (sizes / _SIZE_WIDTH) ** 2)
        found *= self.scale
        found += _EIGHTS**2 * np.outer(a.micro_batch % 8 == 0, b.micro_batch % 8 == 0)
        found += a.doubt @ b.doubt.T
        return found

    def expect(self, new: Points) -> tuple[Numbers, Numbers]:
        """Return mean and variance of the goodness of configurations."""
        shared = self.covariance(new, self.points)
        own = self.scale * (self.apart + _KNOBS**2 + _LINEAGE**2 + _FILL**2 + _SIZE**2)
        own += _EIGHTS**2 * (new.micro_batch % 8 == 0)
        own += (new.doubt**2).sum(axis=1)
        variance = own - np.einsum("ij,jk,ik->i", shared, self._inverse, shared, optimize=True)
        return new.log_objective + shared @ self.weights, np.maximum(variance, 1e-8)

    def shift(self, structure: Numbers, knobs: Numbers) -> Numbers:
        """Return the expected residual of every row of a table, but for what only lineage and memory in use tell.

        Args:
            structure: Of each row.
            knobs: Likewise, shape (rows, knobs).
        """
        points = self.points
        if not len(points.row):
            return np.zeros(len(structure))
        found: Numbers = self.scale * self.apart * by_structure(points.structure, self.weights, structure)
        shared = by_knob(points.structure, points.knobs, self.weights, structure, knobs)
        return found + self.scale * _KNOBS**2 * shared


def _noise(points: Points) -> Numbers:
    """Return the covariance of what measurements add to the goodness."""
    found: Numbers = np.diag(NOISE**2 + _EARLIER_EACH**2 * points.earlier)
    return found + _EARLIER**2 * np.outer(points.earlier, points.earlier)
