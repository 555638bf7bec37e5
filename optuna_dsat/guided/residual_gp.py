"""Gaussian process over the residuals of the step-time model, in the logarithm of the metric.

Rasmussen and Williams 2006, chapter 2. The formula of the step time is the prior mean. The residual of a configuration
is a sum of independent parts:

- of its structure (ZeRO stage and offload), of what several structures have in common (ZeRO 3, an offload), and of the
  lineage;
- of each other knob's value, mostly the same in all structures; for numeric knobs, close values have similar residuals;
- of the micro-batch: smooth functions of its logarithm (a shared function and a function per structure); a rough
  function (Matérn 1/2), so that a size at which speed drops at once says little about other sizes; and the work that
  kernels waste on incomplete tiles ("tile quantization" in NVIDIA, "Matrix Multiplication Background"), the logarithm
  of ``ceil(m / t) t / m`` for tiles of ``t`` samples;
- of the share of memory in use;
- of the coefficients' uncertainty, by the model's derivatives.

The size of these parts differs between machines by orders of magnitude, and most knobs have no effect. The variances of
the parts and of the noise are therefore multiplied by factors. The factors maximise the posterior density (type II
maximum likelihood, MacKay 2003, chapter 28, with log-normal priors; a factor per knob is automatic relevance
determination, Neal 1996) by coordinate ascent. A knob's factor is then replaced by its posterior mean in the logarithm,
given the others: if few launches vary a knob, the most likely factor is small, and a search that relied on it would be
too certain that the knob has no effect (for the same reason Snoek et al. 2012 integrate over such factors).

Measurements of a launch have a common error, its luck, and independent errors. The sum of both variances is the noise
from launch to launch; their ratio is learnt with the other factors if any launch measured several configurations.
Predictions contain neither.

Measurements of an earlier study have a larger noise than measurements of the current study, and a common error
(conditions of that day).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from optuna_dsat.cost.memory_posterior import sum_by_structure
from optuna_dsat.cost.numbers import Numbers

_STRUCTURE_SD, _LINEAGE_SD, _FILL_SD = 0.08, 0.005, 0.03
"""Prior standard deviations of the parts of a configuration, relative to the metric, at a factor of 1."""
_KIND_SD = np.array([0.15, 0.2, 0.2])
"""Prior standard deviations of what structures with ZeRO 3, with an offloaded optimizer and with offloaded parameters
have in common. In published tables ZeRO 0 to 2 deviate from the formula by about a tenth relative to each other, ZeRO 3
and offloads by about 0.4 (``benchmarks/published``), of which the coefficients' uncertainty explains most.
"""
_KNOB_SD, _OWN_SHARE = 0.015, 0.2
"""Prior standard deviation of a knob's value, and the share of its variance that is specific to a structure."""
_DOUBTED_STRUCTURE, _DOUBTED_KNOB = 0.3, 0.5
"""Relative standard deviations of the predicted effects of a structure and of a knob's value."""
_DECADE_WIDTH, _SMOOTH_SHARE = 1.0, 0.7
"""Length scale of a knob's size in decades, and the share of its variance that is smooth in the size."""
_SIZE_SD, _STRUCTURE_SIZE_SD, _SHORT_SIZE_SD = 0.06, 0.03, 0.02
"""Prior standard deviations of parts of the micro-batch: smooth and shared, smooth and per structure, rough."""
_SIZE_WIDTH, _SHORT_SIZE_WIDTH = 3.0, 1.0
"""Length scales of the smooth and the rough parts, in doublings."""
_TILES, _TILE_SD = (2, 4, 8, 16, 32, 64), 0.04
"""Samples per tile, and the standard deviation of the share of the work that each tile size wastes."""
_FILL_WIDTH = 0.2
"""Length scale of the share of memory in use."""
NOISE_SD = 0.02
"""Relative standard deviation of a measured metric between launches of a configuration: the prior's median."""
CPU_NOISE_SD = 0.08
"""The same where ranks run on CPUs, which they share with the rest of the machine: between launches of the recorded
configurations (``benchmarks/landscapes``) it is 9 to 12%.
"""
_POINT_VARIANCE = 0.3**2
"""Variance between measurements of one launch, relative to the variance between launches, at a factor of 1."""
_STEP = 4.0
"""Ratio of neighbouring candidate factors."""
_LIMITS = {
    "structure": (0, 2),
    "configuration": (-2, 2),
    "size": (-2, 4),
    "tile": (-2, 3),
    "doubt": (-2, 1),
    "noise": (-2, 4),
    "point": (-2, 2),
}
"""Smallest and largest power of ``_STEP`` of each group's factor."""
_KNOB_LIMITS = (-3, 3)
_LOG_SD = {"structure": 1.5, "configuration": 1.0, "size": 2.0, "tile": 1.5, "doubt": 1.5, "noise": 1.2, "point": 1.5}
"""Prior standard deviation of the factors' logarithms."""
_KNOB_LOG_SD = 2.0
_SWEEPS = 4
"""Largest number of passes of the coordinate ascent."""
_GRID_POINTS = 129
"""Number of micro-batches, evenly spaced in their logarithm, between which means are interpolated."""
_EARLIER_STUDY_SD, _EARLIER_LAUNCH_SD = 0.05, 0.02
"""Relative standard deviations of errors in earlier studies: shared by all their launches, and per launch."""


def knob_kernel(values: Sequence[Any]) -> Numbers:
    """Return the covariance of a knob's values at a variance of 1, shape (values, values); 0 for None."""
    count = len(values)
    known = np.array([value is not None for value in values])
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values if value is not None
    )
    same = np.eye(count)
    if numbers:
        place = np.log10([max(float(value or 0), 1.0) for value in values])
        same = _SMOOTH_SHARE * _bell(place, place, _DECADE_WIDTH) + (1 - _SMOOTH_SHARE) * same
    result: Numbers = same * np.outer(known, known)
    return result


@dataclass(frozen=True, kw_only=True)
class Points:
    """Inputs of the process for n configurations; each array has length n unless its shape is given."""

    row: Numbers
    """Row of the lineage in the candidate table."""
    structure: Numbers
    """Index of the structure."""
    kinds: Numbers
    """Whether it has ZeRO 3, an offloaded optimizer, offloaded parameters: 0 or 1, shape (n, 3)."""
    knobs: Numbers
    """Index of each knob's value, shape (n, knobs)."""
    structure_effect: Numbers
    """Predicted effect of the structure on the log objective, relative to the best measured configuration."""
    knob_effects: Numbers
    """Predicted effect of each knob's value on the log objective, relative to the mean in its structure, shape (n,
    knobs).
    """
    micro_batch: Numbers
    fill: Numbers
    """Share of the device's memory in use."""
    log_objective: Numbers
    """Log objective predicted by the step-time model: the prior mean."""
    latency: Numbers
    """Predicted seconds of a step."""
    coefficient_factors: Numbers
    """Derivatives of the log objective times a root of the coefficients' covariance, shape (n, k)."""
    earlier: Numbers
    """1 if measured by an earlier study, else 0."""
    launch: Numbers
    """Index of the launch that measured it; negative if it shares a launch with no other configuration."""

    def take(self, index: Numbers) -> Points:
        """Return the configurations at an index array."""
        return Points(**{field_.name: getattr(self, field_.name)[index] for field_ in fields(self)})

    def joined(self, other: Points) -> Points:
        """Return these configurations followed by others."""
        return Points(
            **{
                field_.name: np.concatenate([getattr(self, field_.name), getattr(other, field_.name)])
                for field_ in fields(self)
            }
        )


class ResidualGP:
    """Posterior of residuals given the log objectives ``observed`` at the first of points, the rest running.

    ``kernels`` are covariances of each knob's values at a variance of 1.
    """

    def __init__(
        self, points: Points, observed: Numbers, kernels: Sequence[Numbers], *, noise_sd: float = NOISE_SD
    ) -> None:
        self.points = points
        self._kernels = kernels
        self._noise_sd = noise_sd
        count = len(observed)
        measured = points.take(np.arange(count))
        parts = self._parts(points, points)
        self.factors = self._learnt_factors(
            {name: part[:count, :count] for name, part in parts.items()}, measured, observed - measured.log_objective
        )
        """Factors on the variances of each group of parts, including the noise."""
        signal = self._weighted(parts)
        prior = signal + _noise_covariance(points, self.noise_variance, self.factors["point"])
        self.weights = np.zeros(len(points.row))
        self.weights[:count] = np.linalg.solve(prior[:count, :count], observed - measured.log_objective)
        self._inverse = np.linalg.inv(prior)
        self.posterior_means: Numbers = (points.log_objective + signal @ self.weights)[:count]
        """Posterior mean log objective of each measured point, without noise."""

    @property
    def noise_variance(self) -> float:
        """Learnt variance of a measured log objective from launch to launch."""
        return self.factors["noise"] * self._noise_sd**2

    @property
    def point_variance(self) -> float:
        """Learnt variance of a measured log objective within a launch: a part of ``noise_variance``."""
        return self.noise_variance * _point_share(self.factors["point"])

    def change_within(self, launch: int, new: Points) -> Numbers:
        """Return the standard deviations of the change of posterior means by a measurement in a launch.

        The luck of a launch is partly known from its earlier measurements, so that a difference to these is measured
        more precisely than in another launch (``acquisition.learnt_spread``).
        """
        luck_variance = self.noise_variance - self.point_variance
        shared = self.covariance(new, self.points)
        luck = luck_variance * (self.points.launch == launch)
        solved = self._inverse @ luck
        variance = self._own_variance(new) - np.einsum("ij,ij->i", shared @ self._inverse, shared)
        variance = np.maximum(variance, 1e-8)
        with_luck = -shared @ solved
        measured = variance + 2 * with_luck + luck_variance - luck @ solved + self.point_variance
        result: Numbers = np.maximum(variance + with_luck, 1e-8) / np.sqrt(np.maximum(measured, 1e-8))
        return result

    def covariance(self, a: Points, b: Points) -> Numbers:
        """Return the prior covariance of the log objectives of two sets of configurations, without noise."""
        return self._weighted(self._parts(a, b))

    def predict(self, new: Points) -> tuple[Numbers, Numbers]:
        """Return posterior mean and variance of the log objective of configurations."""
        shared = self.covariance(new, self.points)
        variance = self._own_variance(new)
        variance -= np.einsum("ij,ij->i", shared @ self._inverse, shared)
        return new.log_objective + shared @ self.weights, np.maximum(variance, 1e-8)

    def joint(self, new: Points) -> tuple[Numbers, Numbers]:
        """Return posterior mean (n,) and covariance (n, n) of the log objectives of n configurations."""
        shared = self.covariance(new, self.points)
        covariance = self.covariance(new, new) - shared @ self._inverse @ shared.T
        return new.log_objective + shared @ self.weights, covariance

    def structure_means(self, structure: Numbers, kinds: Numbers, effect: Numbers) -> Numbers:
        """Return the mean of the structures' part for n lineages; ``kinds`` (n, 3) and ``effect`` as in ``Points``."""
        points = self.points
        if not len(points.row):
            return np.zeros(len(structure))
        factor = self.factors["structure"]
        doubt = self.factors["doubt"] * _DOUBTED_STRUCTURE**2
        result: Numbers = factor * _STRUCTURE_SD**2 * sum_by_structure(points.structure, self.weights, structure)
        result += factor * kinds @ (_KIND_SD**2 * (points.kinds.T @ self.weights))
        return result + doubt * effect * sum_by_structure(
            points.structure, self.weights * points.structure_effect, structure
        )

    def knob_moments(self, structure: int, knobs: Numbers, effects: Numbers) -> tuple[Numbers, Numbers]:
        """Return mean and variance of the knobs' parts for n lineages of a structure; (n, knobs) as in ``Points``."""
        doubt = self.factors["doubt"] * _DOUBTED_KNOB**2
        shared = doubt * effects @ self.points.knob_effects.T
        variance = doubt * (effects**2).sum(axis=1)
        near = (1 - _OWN_SHARE) + _OWN_SHARE * (self.points.structure == structure)
        for place, kernel in enumerate(self._kernels):
            factor = self.factors[_knob(place)] * _KNOB_SD**2
            variance += factor * np.diag(kernel)[knobs[:, place]]
            shared += (factor * near * kernel[:, self.points.knobs[:, place]])[knobs[:, place]]
        variance -= np.einsum("ij,ij->i", shared @ self._inverse, shared)
        return shared @ self.weights, np.maximum(variance, 0.0)

    def size_means(self, structure: Numbers, micro_batch: Numbers) -> Numbers:
        """Return the posterior mean of the micro-batch's parts of the residual, (..., n) as ``micro_batch``."""
        points, factor = self.points, self.factors["size"]
        result = np.zeros(micro_batch.shape)
        if not len(points.row):
            return result
        grid = np.linspace(0.0, max(1.0, float(np.log2(micro_batch.max()))), _GRID_POINTS)
        smooth = _bell(grid, np.log2(points.micro_batch), _SIZE_WIDTH)
        shared = _SIZE_SD**2 * smooth + _SHORT_SIZE_SD**2 * _rough(grid, np.log2(points.micro_batch), _SHORT_SIZE_WIDTH)
        place = np.log2(micro_batch)
        result += np.interp(place, grid, factor * shared @ self.weights)
        for group in np.unique(points.structure):
            specific = factor * _STRUCTURE_SIZE_SD**2 * smooth @ np.where(points.structure == group, self.weights, 0.0)
            result += np.where(structure == group, np.interp(place, grid, specific), 0.0)
        return result

    def _parts(self, a: Points, b: Points) -> dict[str, Numbers]:
        """Return the covariances of each group of parts at a factor of 1."""
        same = a.structure[:, None] == b.structure[None, :]
        near = (1 - _OWN_SHARE) + _OWN_SHARE * same
        configuration: Numbers = _LINEAGE_SD**2 * (a.row[:, None] == b.row[None, :])
        configuration += _FILL_SD**2 * _bell(a.fill, b.fill, _FILL_WIDTH)
        octaves = np.log2(a.micro_batch), np.log2(b.micro_batch)
        size = _bell(*octaves, _SIZE_WIDTH) * (_SIZE_SD**2 + _STRUCTURE_SIZE_SD**2 * same)
        size += _SHORT_SIZE_SD**2 * _rough(*octaves, _SHORT_SIZE_WIDTH)
        record = {
            "given": a.coefficient_factors @ b.coefficient_factors.T,
            "structure": _STRUCTURE_SD**2 * same + (a.kinds * _KIND_SD**2) @ b.kinds.T,
            "configuration": configuration,
            "size": size,
            "tile": _TILE_SD**2 * _tile_waste(a.micro_batch) @ _tile_waste(b.micro_batch).T,
        }
        effects = np.outer(a.structure_effect, b.structure_effect)
        record["doubt"] = _DOUBTED_STRUCTURE**2 * effects * same + _DOUBTED_KNOB**2 * a.knob_effects @ b.knob_effects.T
        for place, kernel in enumerate(self._kernels):
            record[_knob(place)] = _KNOB_SD**2 * near * kernel[np.ix_(a.knobs[:, place], b.knobs[:, place])]
        return record

    def _weighted(self, parts: Mapping[str, Numbers]) -> Numbers:
        """Return the sum of parts with their factors."""
        total = parts["given"].copy()
        for group, part in parts.items():
            if group != "given":
                total += self.factors[group] * part
        return total

    def _own_variance(self, new: Points) -> Numbers:
        """Return the prior variance of each configuration: the diagonal of ``covariance(new, new)``."""
        of = self.factors
        result: Numbers = (
            of["structure"] * (_STRUCTURE_SD**2 + new.kinds @ _KIND_SD**2)
            + of["configuration"] * (_LINEAGE_SD**2 + _FILL_SD**2)
            + of["size"] * (_SIZE_SD**2 + _STRUCTURE_SIZE_SD**2 + _SHORT_SIZE_SD**2)
            + of["doubt"]
            * (_DOUBTED_STRUCTURE**2 * new.structure_effect**2 + _DOUBTED_KNOB**2 * (new.knob_effects**2).sum(axis=1))
            + of["tile"] * _TILE_SD**2 * (_tile_waste(new.micro_batch) ** 2).sum(axis=1)
            + (new.coefficient_factors**2).sum(axis=1)
        )
        for place, kernel in enumerate(self._kernels):
            result += of[_knob(place)] * _KNOB_SD**2 * np.diag(kernel)[new.knobs[:, place]]
        return result

    def _learnt_factors(self, parts: Mapping[str, Numbers], points: Points, residuals: Numbers) -> dict[str, float]:
        """Return factors of large posterior density; knobs' factors are posterior means, each given the others."""
        knobs = [_knob(place) for place in range(len(self._kernels))]
        limits = {**_LIMITS, **dict.fromkeys(knobs, _KNOB_LIMITS)}
        if not len(residuals):
            return dict.fromkeys(limits, 1.0)
        usual = self._noise_sd**2
        noise = np.diag(np.full(len(residuals), usual))
        luck = _luck_covariance(points, usual, 1.0)
        shares = bool(np.any(luck))
        steady = parts["given"] + _noise_covariance(points, 0.0, 1.0)
        groups = {**{name: parts[name] for name in parts if name != "given"}, "noise": noise}
        moving = {name: part for name, part in groups.items() if np.any(part)}
        spreads = {**_LOG_SD, **dict.fromkeys(knobs, _KNOB_LOG_SD)}

        def density(covariance: Numbers, powers: Mapping[str, int]) -> float:
            root = np.linalg.cholesky(covariance)
            fit = float((np.linalg.solve(root, residuals) ** 2).sum()) + 2 * float(np.log(np.diag(root)).sum())
            return -0.5 * (fit + sum((powers[name] * math.log(_STEP) / spreads[name]) ** 2 for name in moving))

        def change(name: str, power: int) -> Numbers:
            """Return the change of the covariance if a factor becomes another power."""
            difference = _STEP**power - _STEP ** powers[name]
            if name not in ("noise", "point") or not shares:
                return difference * moving[name]
            if name == "noise":
                return difference * (noise + _luck_covariance(points, usual, _STEP ** powers["point"]))
            variance, before, after = usual * _STEP ** powers["noise"], _STEP ** powers[name], _STEP**power
            return _luck_covariance(points, variance, after) - _luck_covariance(points, variance, before)

        powers = dict.fromkeys(limits, 0)
        total = steady + sum(moving.values())
        if shares:
            total = total + luck
            moving["point"] = luck
        best = density(total, powers)
        for _ in range(_SWEEPS):
            moved = False
            for name in moving:
                for way in (-1, 1):
                    while limits[name][0] <= powers[name] + way <= limits[name][1]:
                        step = change(name, powers[name] + way)
                        result = density(total + step, {**powers, name: powers[name] + way})
                        if result <= best:
                            break
                        powers[name] += way
                        best, total, moved = result, total + step, True
            if not moved:
                break
        factors = {name: _STEP**power for name, power in powers.items()}
        for name in (name for name in knobs if name in moving):
            tried = range(limits[name][0], limits[name][1] + 1)
            steps = [total + (_STEP**power - factors[name]) * moving[name] for power in tried]
            logs = np.array([density(item, {**powers, name: power}) for item, power in zip(steps, tried, strict=True)])
            factors[name] = _STEP ** float(np.average(tried, weights=np.exp(logs - logs.max())))
        return factors


def _knob(place: int) -> str:
    return f"knob {place}"


def _bell(a: Numbers, b: Numbers, width: float) -> Numbers:
    """Return the squared exponential kernel, shape (len(a), len(b))."""
    result: Numbers = np.exp(-0.5 * ((a[:, None] - b[None, :]) / width) ** 2)
    return result


def _rough(a: Numbers, b: Numbers, width: float) -> Numbers:
    """Return the exponential kernel, shape (len(a), len(b)); its functions are continuous, but not smooth."""
    result: Numbers = np.exp(-np.abs(a[:, None] - b[None, :]) / width)
    return result


def _tile_waste(micro_batch: Numbers) -> Numbers:
    """Return the log ratio of computed to requested samples for each tile size, shape (n, tiles)."""
    tiles = np.array(_TILES, dtype=np.float64)
    done = np.ceil(micro_batch[:, None] / tiles) * tiles
    result: Numbers = np.minimum(np.log(done / micro_batch[:, None]), math.log(2))
    return result


def _noise_covariance(points: Points, variance: float, point: float) -> Numbers:
    """Return the noise covariance of measured log objectives, given its variance and the factor of point noise."""
    result: Numbers = np.diag(variance + _EARLIER_LAUNCH_SD**2 * points.earlier)
    result += _luck_covariance(points, variance, point)
    return result + _EARLIER_STUDY_SD**2 * np.outer(points.earlier, points.earlier)


def _luck_covariance(points: Points, variance: float, point: float) -> Numbers:
    """Return the covariance of measurements by the luck of the launches that they share; 0 on the diagonal."""
    shared = (points.launch[:, None] == points.launch[None, :]) & (points.launch[:, None] >= 0)
    np.fill_diagonal(shared, val=False)
    result: Numbers = variance * (1 - _point_share(point)) * shared
    return result


def _point_share(factor: float) -> float:
    """Return the share of the variance between launches that is between measurements of one launch."""
    ratio = factor * _POINT_VARIANCE
    return ratio / (1 + ratio)
