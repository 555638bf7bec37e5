"""What is believed of memory after some launches: the predicted peak of any configuration, and whether it fits.

The prior mean are the formulas of ``optuna_dsat.cost.memory``. What they miss is a Gaussian process with few parts,
each linear: activations per sample (one factor for all lineages, and a small one per structure), a constant shared by
all, one per structure (ZeRO stage and offload), one per value of a knob within its structure, one per lineage. A
measured peak says nearly all of its own lineage, much of its structure, and a little of the others.

How much memory can be used is uncertain as well: the CUDA context, NCCL's buffers and fragmentation are not in a peak.
So a launch that fitted or ran out of memory says on which side of the limit its load lies, no more. Such one-sided
observations are taken in one at a time, each as the normal distribution that has the same mean and variance as the
truncated one (assumed-density filtering; Opper 1998, Minka 2001).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Loads", "MemoryPosterior", "alike", "by_knob", "by_structure", "normal_cdf"]

Numbers: TypeAlias = npt.NDArray[Any]

_SLOPE = 0.08
"""Error of the profiled activations per sample, relative; shared by all lineages."""
_OWN_SLOPE = 0.03
"""Likewise, for one structure."""
_SHARED, _STRUCTURE, _KNOBS, _LINEAGE, _NOISE = 0.01, 0.03, 0.02, 0.01, 0.003
"""Errors of the formulas, relative to the device's memory."""
_FRAGMENTED = 0.03
"""Share of the memory lost between blocks, give or take ``_FRAGMENTED_SD``."""
_FRAGMENTED_SD = 0.02
_SCATTERED, _SCATTERED_SD = 0.01, 0.015
"""Share lost beside that where gradients are not contiguous, which is what contiguous ones are there to avoid."""
_CONTEXT_BYTES = 0.8 * 2**30
"""CUDA context and NCCL's buffers: 0.4 to 1.6 GiB, see ``optuna_dsat.cost.memory``."""
_CONTEXT_SD_BYTES = 0.4 * 2**30
_TELLING = 0.85
"""Share of the usable memory below which it goes without saying that a peak is within the limit."""
_MOST_SIDES = 64
"""One-sided observations taken in: those nearest to the limit."""
_SURPRISING = 2.5
"""Standard deviations that make a launch that is out of memory a surprise: then the limit is known half as well."""
_MOST_SURPRISES = 6
_CERTAIN = 2.5
"""Standard deviations from which on a one-sided observation says nothing new."""


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Configurations, one element each."""

    lineage: Numbers
    structure: Numbers
    """Number of the ZeRO stage and offload."""
    knobs: Numbers
    """Number of each knob's value, shape (n, knobs)."""
    micro_batch: Numbers
    forward: Numbers
    """Predicted bytes at the end of the forward pass at micro-batch 0."""
    others: Numbers
    """Predicted bytes at the other moments of a step."""
    scattered: Numbers
    """1 where gradients are not contiguous, so that the allocator is left with more gaps; else 0."""

    def take(self, index: Any) -> Loads:
        """Return the rows of an index array."""
        return Loads(**{one.name: getattr(self, one.name)[index] for one in fields(self)})


def alike(a: Numbers, b: Numbers) -> Numbers:
    """Return the share of knobs that rows of ``a`` and ``b`` have in common, shape (len(a), len(b))."""
    total = np.zeros((len(a), len(b)))
    for one, other in zip(a.T, b.T, strict=True):
        total += one[:, None] == other[None, :]
    found: Numbers = total / max(1, a.shape[1])
    return found


def by_structure(known: Numbers, weights: Numbers, asked: Numbers) -> Numbers:
    """Return for each structure asked for the sum of the weights of those known that are the same."""
    count = 1 + int(max(known.max(initial=0), asked.max(initial=0)))
    found: Numbers = np.bincount(known, weights, minlength=count)[asked]
    return found


def by_knob(
    structure: Numbers, knobs: Numbers, weights: Numbers, asked_structure: Numbers, asked_knobs: Numbers
) -> Numbers:
    """Return the sums of weights times the share of knobs in common, within the same structure.

    What ``(alike(asked_knobs, knobs) * same_structure) @ weights`` would be, without the matrix.
    """
    total = np.zeros(len(asked_structure))
    for own, other in zip(knobs.T, asked_knobs.T, strict=True):
        values = 1 + int(max(own.max(initial=0), other.max(initial=0)))
        total += by_structure(structure * values + own, weights, asked_structure * values + other)
    found: Numbers = total / max(1, knobs.shape[1])
    return found


def normal_cdf(z: Numbers) -> Numbers:
    """Return the standard normal distribution function (logistic approximation by Bowling et al. 2009, error 1e-4)."""
    clipped = np.clip(z, -8.0, 8.0)
    found: Numbers = 1 / (1 + np.exp(-(0.07056 * clipped**3 + 1.5976 * clipped)))
    return found


class MemoryPosterior:
    """Believed peaks.

    Args:
        device_bytes: Memory of one rank's device.
        bytes_per_sample: Profiled activations.
        on_cpu: Whether the ranks compute on the CPU, where neither context nor fragmentation is missing in a peak.
    """

    def __init__(self, *, device_bytes: int, bytes_per_sample: int, on_cpu: bool) -> None:
        self._device = float(device_bytes)
        self._slope = float(bytes_per_sample)
        self.usable = self._device * (1 - _FRAGMENTED) - (0.0 if on_cpu else _CONTEXT_BYTES)
        """Expected bytes that a peak may reach."""
        spread = math.hypot(_FRAGMENTED_SD * self._device, 0.0 if on_cpu else _CONTEXT_SD_BYTES)
        self._limit_variance = spread**2
        self._loads: Loads | None = None
        self._one_sided: Numbers = np.zeros(0)
        self._weights: Numbers = np.zeros(0)
        self._inverse: Numbers = np.zeros((0, 0))

    def observe(self, loads: Loads, peaks: Numbers, too_large: Numbers) -> None:
        """Take in what all launches so far showed, replacing what was taken in before.

        Args:
            loads: What was launched.
            peaks: Measured bytes; NaN where only known to fit or not.
            too_large: Whether it ran out of memory.
        """
        measured = np.flatnonzero(~np.isnan(peaks) & ~too_large)
        # A launch that ran is two observations: its peak, and that its load is within the limit.
        telling = too_large | np.isnan(peaks) | (peaks > _TELLING * self.usable)
        sides = np.flatnonzero(telling)
        nearest = np.argsort(np.abs(self._predicted(loads.take(sides)) - self.usable), kind="stable")
        sides = np.sort(sides[nearest[:_MOST_SIDES]])
        index = np.concatenate([measured, sides])
        one_sided = np.arange(len(index)) >= len(measured)
        all_loads = loads.take(index)
        self._limit_variance *= 4.0 ** min(_MOST_SURPRISES, self._surprises(loads.take(too_large)))
        lost = _SCATTERED * self._device * all_loads.scattered * one_sided
        predicted = self._predicted(all_loads) + lost
        prior = self._covariance(all_loads, all_loads)
        prior += self._lost(all_loads, all_loads) * np.outer(one_sided, one_sided)
        noise = (_NOISE * self._device) ** 2
        exact, rest = slice(0, len(measured)), slice(len(measured), None)
        gains = np.linalg.solve(prior[exact, exact] + noise * np.eye(len(measured)), prior[exact, rest]).T
        mean = predicted[rest] + gains @ (peaks[measured] - predicted[exact])
        seen, noises = _one_by_one(mean, prior[rest, rest] - gains @ prior[exact, rest], self.usable, too_large[sides])
        values = np.concatenate([peaks[measured], seen])
        variances = np.concatenate([np.full(len(measured), noise), noises])
        used = np.isfinite(variances)
        self._loads = all_loads.take(used)
        self._one_sided = one_sided[used].astype(np.float64)
        self._inverse = np.linalg.inv(prior[np.ix_(used, used)] + np.diag(variances[used]))
        self._weights = self._inverse @ (values - predicted)[used]

    def _surprises(self, too_large: Loads) -> int:
        """Return how many launches ran out of memory that should have had plenty: others use the device, too."""
        spread = np.sqrt(self._variance(too_large) + self._limit_variance)
        return int(np.sum(self._predicted(too_large) < self.usable - _SURPRISING * spread))

    def peaks(self, loads: Loads) -> Numbers:
        """Return the expected peaks in bytes, leaving aside what only a lineage itself can tell: quick for many."""
        return self._predicted(loads) + self._shift(loads)

    def _shift(self, loads: Loads) -> Numbers:
        """Return the parts of the correction that are sums over few numbers."""
        constant, slope = self._line(loads)
        found: Numbers = constant + slope * loads.micro_batch
        return found

    def _line(self, loads: Loads) -> tuple[Numbers, Numbers]:
        """Return that correction as a constant and bytes per sample."""
        known, weights = self._loads, self._weights
        if known is None or not len(weights):
            return np.zeros(len(loads.lineage)), np.zeros(len(loads.lineage))
        samples = self._slope * known.micro_batch
        constant = _SHARED**2 * weights.sum() + _STRUCTURE**2 * by_structure(known.structure, weights, loads.structure)
        constant += _KNOBS**2 * by_knob(known.structure, known.knobs, weights, loads.structure, loads.knobs)
        own = _OWN_SLOPE**2 * by_structure(known.structure, weights * samples, loads.structure)
        return self._device**2 * constant, self._slope * (_SLOPE**2 * (weights @ samples) + own)

    @property
    def limit(self) -> float:
        """Expected bytes that a peak may reach, after what was observed."""
        return self.usable - self._limit_variance * float(self._one_sided @ self._weights)

    def largest(self, loads: Loads, limit: float) -> Numbers:
        """Return the largest micro-batches whose expected peak is within a limit, 0 for none."""
        constant, slope = self._line(loads)
        room = np.floor((limit - loads.forward - constant) / np.maximum(1.0, self._slope + slope))
        found = np.where(loads.others + constant > limit, 0, np.clip(room, 0, 2**31))
        return found.astype(np.int64)

    def expect(self, loads: Loads) -> tuple[Numbers, Numbers, Numbers]:
        """Return for each configuration the expected peak, and mean and deviation of what is left to the limit.

        All in bytes; a configuration fits where what is left is positive.
        """
        predicted = self._predicted(loads)
        own = self._variance(loads) + self._limit_variance + (_SCATTERED_SD * self._device * loads.scattered) ** 2
        lost = _SCATTERED * self._device * loads.scattered
        known = self._loads
        if known is None or not len(self._weights):
            return predicted, self.usable - predicted - lost, np.sqrt(own)
        shared = self._covariance(loads, known)
        load = shared + self._lost(loads, known) * self._one_sided
        left = self.usable - predicted - lost - load @ self._weights
        variance = own - np.einsum("ij,jk,ik->i", load, self._inverse, load, optimize=True)
        return predicted + shared @ self._weights, left, np.sqrt(np.maximum(variance, 1.0))

    def _predicted(self, loads: Loads) -> Numbers:
        found: Numbers = np.maximum(loads.forward + self._slope * loads.micro_batch, loads.others)
        return found

    def _covariance(self, a: Loads, b: Loads) -> Numbers:
        same = a.structure[:, None] == b.structure[None, :]
        samples = np.outer(self._slope * a.micro_batch, self._slope * b.micro_batch)
        scale = self._device**2
        within = _STRUCTURE**2 + _KNOBS**2 * alike(a.knobs, b.knobs)
        found: Numbers = samples * (_SLOPE**2 + _OWN_SLOPE**2 * same) + scale * (_SHARED**2 + within * same)
        found += scale * _LINEAGE**2 * (a.lineage[:, None] == b.lineage[None, :])
        return found

    def _lost(self, a: Loads, b: Loads) -> Numbers:
        """Return the covariance of what is lost to context and gaps."""
        scattered = np.outer(a.scattered, b.scattered)
        found: Numbers = self._limit_variance + (_SCATTERED_SD * self._device) ** 2 * scattered
        return found

    def _variance(self, loads: Loads) -> Numbers:
        errors = _SHARED**2 + _STRUCTURE**2 + _KNOBS**2 + _LINEAGE**2
        found: Numbers = (self._slope * loads.micro_batch) ** 2 * (_SLOPE**2 + _OWN_SLOPE**2) + errors * self._device**2
        return found


def _one_by_one(mean: Numbers, covariance: Numbers, limit: float, above: Numbers) -> tuple[Numbers, Numbers]:
    """Take in one-sided observations; return the measurements they amount to: values and variances, infinite for none.

    Args:
        mean: Expected loads.
        covariance: Of the loads.
        limit: Of all loads.
        above: Whether each load is known to be above the limit.
    """
    values, noises = mean.copy(), np.full(len(mean), math.inf)
    for row, side in enumerate(above):
        variance = float(covariance[row, row])
        found = _truncated(float(mean[row]), variance, limit, above=bool(side))
        if found is not None:
            values[row], noises[row] = found
            gain = covariance[:, row] / (variance + noises[row])
            mean = mean + gain * (values[row] - mean[row])
            covariance = covariance - np.outer(gain, covariance[row])
    return values, noises


def _truncated(mean: float, variance: float, limit: float, *, above: bool) -> tuple[float, float] | None:
    """Return value and variance of the measurement that does what knowing the side of the limit does.

    None where the side is no news.
    """
    spread = math.sqrt(max(variance, 1.0))
    sign = 1.0 if above else -1.0
    z = sign * (mean - limit) / spread
    if z > _CERTAIN:
        return None
    z = max(z, -6.0)
    normal = NormalDist()
    hazard = normal.pdf(z) / normal.cdf(z)
    shrunk = 1 - hazard * (hazard + z)
    shrunk = min(max(shrunk, 1e-3), 0.999)
    updated = mean + sign * spread * hazard
    noise = variance * shrunk / (1 - shrunk)
    return updated + (updated - mean) * noise / variance, noise
