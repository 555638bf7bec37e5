"""Gaussian process over the residuals of the step-time model, in the logarithm of the metric.

Rasmussen and Williams 2006, chapter 2. The residual of a configuration is a sum of independent parts: one per structure
(ZeRO stage and offload), one per value of a knob within a structure, one per lineage, smooth functions of the share of
memory in use and of the micro-batch (caches, kernels), one shared by micro-batches that are multiples of 8 (their
kernels differ; NVIDIA, "Matrix Multiplication Background"), and the effect of the coefficients' own uncertainty, by the
model's derivatives. A common factor, estimated from the measurements, scales the variances of all parts but the last
two: the model's accuracy elsewhere carries no information on kernels.

Measurements of an earlier study have a larger noise than those of this one, and an error in common (conditions of that
day).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optuna_dsat.cost.memory_posterior import knob_similarity, sum_by_knob, sum_by_structure

__all__ = ["NOISE_SD", "Points", "ResidualGP"]

Numbers: TypeAlias = npt.NDArray[Any]

_STRUCTURE_SD, _KNOBS_SD, _LINEAGE_SD, _FILL_SD, _SIZE_SD, _MULTIPLE_OF_8_SD = 0.05, 0.05, 0.015, 0.03, 0.03, 0.04
"""Prior standard deviations of the residuals' parts, relative to the metric."""
_SCALES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""Candidate factors on these variances; the one with the largest likelihood is used."""
_SCALE_LOG_SD = 1.5
"""Prior standard deviation of the factor's logarithm."""
_FILL_WIDTH = 0.2
"""Length scale of the share of memory in use."""
_SIZE_WIDTH = 1.0
"""Length scale of the micro-batch, in doublings."""
NOISE_SD = 0.02
"""Relative standard deviation of a measured metric between launches of one configuration."""
_EARLIER_STUDY_SD, _EARLIER_LAUNCH_SD = 0.05, 0.02
"""Relative standard deviations of errors in earlier studies: shared by all their launches, and per launch."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """Inputs of the process for n configurations; each array has length n unless its shape is given."""

    row: Numbers
    """Row of the lineage in the candidate table."""
    structure: Numbers
    """Index of the structure."""
    knobs: Numbers
    """Index of each knob's value, shape (n, knobs)."""
    micro_batch: Numbers
    fill: Numbers
    """Share of the device's memory in use."""
    log_objective: Numbers
    """Predicted by the step-time model: the prior mean."""
    latency: Numbers
    """Predicted seconds of a step."""
    coefficient_factors: Numbers
    """Derivatives of the log objective times a root of the coefficients' covariance, shape (n, k)."""
    earlier: Numbers
    """1 if measured by an earlier study, else 0."""

    def take(self, index: Numbers) -> Points:
        """Return the configurations at an index array."""
        return Points(**{one.name: getattr(self, one.name)[index] for one in fields(self)})


class ResidualGP:
    """Posterior of the residuals given measurements.

    Args:
        points: Measured configurations, followed by those in flight.
        observed: Measured log objectives of the first ``len(observed)`` points.
    """

    def __init__(self, points: Points, observed: Numbers) -> None:
        self.points = points
        count = len(observed)
        measured = points.take(np.arange(count))
        self.scale = self._max_likelihood_scale(measured, observed - measured.log_objective)
        signal = self.covariance(points, points)
        prior = signal + _noise_covariance(points)
        self.weights = np.zeros(len(points.row))
        self.weights[:count] = np.linalg.solve(prior[:count, :count], observed - measured.log_objective)
        self._inverse = np.linalg.inv(prior)
        self.posterior_means: Numbers = (points.log_objective + signal @ self.weights)[:count]
        """Posterior mean log objective of each measured point, without noise."""

    def _max_likelihood_scale(self, points: Points, residuals: Numbers) -> float:
        """Return the factor on the residuals' variances with the largest posterior density, among ``_SCALES``.

        The accuracy of the step-time model differs between studies, from a per cent to a tenth. Type II maximum
        likelihood (MacKay 2003, chapter 28) with a log-normal prior.
        """
        found = []
        for scale in _SCALES:
            self.scale = scale
            covariance = self.covariance(points, points) + _noise_covariance(points)
            fit = residuals @ np.linalg.solve(covariance, residuals) + np.linalg.slogdet(covariance)[1]
            found.append(-0.5 * fit - 0.5 * math.log(scale) ** 2 / _SCALE_LOG_SD**2)
        return _SCALES[int(np.argmax(found))]

    @property
    def structure_variance(self) -> float:
        """Prior variance of a structure's part, before the common factor is applied.

        Scaled, it is never below the prior: agreement within one structure carries no information on others.
        """
        return _STRUCTURE_SD**2 / min(1.0, self.scale)

    def covariance(self, a: Points, b: Points) -> Numbers:
        """Return the prior covariance of the log objectives of two sets of configurations, without noise."""
        same = a.structure[:, None] == b.structure[None, :]
        found: Numbers = same * (self.structure_variance + _KNOBS_SD**2 * knob_similarity(a.knobs, b.knobs))
        found += _LINEAGE_SD**2 * (a.row[:, None] == b.row[None, :])
        found += _FILL_SD**2 * np.exp(-0.5 * ((a.fill[:, None] - b.fill[None, :]) / _FILL_WIDTH) ** 2)
        sizes = np.log2(a.micro_batch)[:, None] - np.log2(b.micro_batch)[None, :]
        found += _SIZE_SD**2 * np.exp(-0.5 * (sizes / _SIZE_WIDTH) ** 2)
        found *= self.scale
        found += _MULTIPLE_OF_8_SD**2 * np.outer(a.micro_batch % 8 == 0, b.micro_batch % 8 == 0)
        found += a.coefficient_factors @ b.coefficient_factors.T
        return found

    def predict(self, new: Points) -> tuple[Numbers, Numbers]:
        """Return posterior mean and variance of the log objective of configurations."""
        shared = self.covariance(new, self.points)
        own = self.scale * (self.structure_variance + _KNOBS_SD**2 + _LINEAGE_SD**2 + _FILL_SD**2 + _SIZE_SD**2)
        own += _MULTIPLE_OF_8_SD**2 * (new.micro_batch % 8 == 0)
        own += (new.coefficient_factors**2).sum(axis=1)
        variance = own - np.einsum("ij,jk,ik->i", shared, self._inverse, shared, optimize=True)
        return new.log_objective + shared @ self.weights, np.maximum(variance, 1e-8)

    def structure_means(self, structure: Numbers, knobs: Numbers) -> Numbers:
        """Return for n lineages the posterior mean of the structure's and the knobs' parts of the residual.

        Args:
            structure: Index of each lineage's structure, length n.
            knobs: Index of each knob's value, shape (n, knobs).
        """
        points = self.points
        if not len(points.row):
            return np.zeros(len(structure))
        found: Numbers = (
            self.scale * self.structure_variance * sum_by_structure(points.structure, self.weights, structure)
        )
        shared = sum_by_knob(points.structure, points.knobs, self.weights, structure, knobs)
        return found + self.scale * _KNOBS_SD**2 * shared


def _noise_covariance(points: Points) -> Numbers:
    """Return the noise covariance of measured log objectives."""
    found: Numbers = np.diag(NOISE_SD**2 + _EARLIER_LAUNCH_SD**2 * points.earlier)
    return found + _EARLIER_STUDY_SD**2 * np.outer(points.earlier, points.earlier)
