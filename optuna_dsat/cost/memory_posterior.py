"""Gaussian posterior over peak memory: predicted peak of any configuration, and the probability that it fits.

The prior mean is given by the formulas of ``optuna_dsat.cost.memory``. Their error is a Gaussian process, a sum of
linear parts: activations per sample (a factor shared by all lineages, and a smaller factor per structure), and
constants: shared by all, per ZeRO stage, per offload, per structure (stage and offloads), per value of a knob within
its structure, and per lineage. A measured peak determines its lineage almost completely, its structure largely, and
the others less. If a peak is far from its formula, the formulas of other structures are assumed to be equally wrong:
the shared variance is scaled by the factor with the largest posterior density given the measured peaks (type II maximum
likelihood, MacKay 2003, chapter 28). The formulas take the largest of a step's moments; an unknown share of the
activations may be allocated at the other moments too.

The usable memory is uncertain as well: the CUDA context, NCCL's buffers and fragmentation are not part of a peak. It is
at least the largest measured peak. A launch that fitted or ran out of memory only shows whether its memory is below or
above the limit. Such one-sided observations are included as normal distributions that reproduce the means and variances
of the truncated distributions (expectation propagation; Minka 2001, "Expectation Propagation for Approximate Bayesian
Inference").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import numpy as np

from optuna_dsat.cost.numbers import Numbers

_SLOPE_SD = 0.1
"""Relative standard deviation of the profiled activations per sample, shared by all lineages."""
_STRUCTURE_SLOPE_SD = 0.03
"""Relative standard deviation of the activations per sample of each structure."""
_CURVE_SD, _CURVE_WIDTH = 0.03, 1.0
"""Relative standard deviation of a smooth function of the micro-batch's logarithm, and its length scale in doublings.
"""
_HIDDEN_SD = 0.4
"""Standard deviation of the share of the activations still allocated at the other moments of a step."""
_BUFFER_SD = 0.6
"""Standard deviation of the share of ``MemoryInputs.buffers`` by which the formulas are wrong."""
_SHARED_SD, _STAGE_SD, _OFFLOAD_SD, _STRUCTURE_SD = 0.012, 0.02, 0.012, 0.02
"""Standard deviations of the formulas' error, relative to the device's memory: common to all, per ZeRO stage,
per optimizer offload (also per parameter offload), and per structure."""
_KNOBS_SD, _LINEAGE_SD, _NOISE_SD = 0.02, 0.005, 0.003
"""The same for a knob's value within its structure, a lineage, and a measurement."""
_RELATIVE_SDS = (_STAGE_SD, _OFFLOAD_SD, _OFFLOAD_SD)
_ERROR_FACTORS, _ERROR_LOG_SD = (1.0, 4.0, 16.0, 64.0, 256.0), 2.0
"""Candidate factors on the variance of the shared errors, and the prior standard deviation of their logarithm."""
_FRAGMENTATION = 0.03
"""Prior mean of the share of memory lost to fragmentation."""
_FRAGMENTATION_SD = 0.02
_NON_CONTIGUOUS_LOSS, _NON_CONTIGUOUS_LOSS_SD = 0.01, 0.015
"""Additional share lost, and its standard deviation, if gradients are not contiguous."""
_CONTEXT_BYTES = 0.8 * 2**30
"""CUDA context and NCCL's buffers: 0.4 to 1.6 GiB, see ``optuna_dsat.cost.memory``."""
_CONTEXT_SD_BYTES = 0.4 * 2**30
_INFORMATIVE_SHARE = 0.85
"""Share of the usable memory below which a peak within the limit carries no information on the limit."""
_MAX_ONE_SIDED = 64
"""Largest number of one-sided observations; the nearest to the limit are used."""
_SURPRISE_SIGMAS = 2.5
"""Standard deviations by which a launch must be predicted to fit for an out-of-memory result to be a surprise.

Each surprise doubles the standard deviation of the limit or, if the device is known to have enough memory, the standard
deviation of the structure's error.
"""
_MAX_SURPRISES, _MAX_STRUCTURE_SURPRISES = 6, 3
_CLOSE = 1.05
"""Ratio of an expected to the largest measured peak, up to which memory does not explain an out-of-memory result."""
_SWEEPS = 4
"""Iterations of expectation propagation; each replaces the previous approximation of every one-sided observation."""
_LEAST_SHARE = 1e-3
"""Smallest share of the precision that remains when an observation is taken out, even if it carries all of it."""
_UNINFORMATIVE_SIGMAS = 2.5
"""Standard deviations beyond which a one-sided observation carries no information."""


@dataclass(frozen=True, kw_only=True)
class MemoryInputs:
    """Inputs of the memory posterior for n configurations; each array has length n."""

    lineage: Numbers
    """Index of the lineage."""
    structure: Numbers
    """Index of the structure (ZeRO stage and offload)."""
    relatives: Numbers
    """Index of the ZeRO stage, of the optimizer's offload and of the parameters' offload, shape (n, 3)."""
    knobs: Numbers
    """Index of each knob's value, shape (n, knobs)."""
    micro_batch: Numbers
    activations: Numbers
    """Activations per sample, relative to the model without checkpointing."""
    forward: Numbers
    """Predicted bytes at the end of the forward pass at micro-batch 0."""
    others: Numbers
    """Predicted bytes at the other moments of a step."""
    buffers: Numbers
    """Bytes on the device by which a knob's value may exceed its cheapest value, shape (n, any)."""
    non_contiguous: Numbers
    """1 if gradients are not contiguous, which fragments memory; else 0."""

    @property
    def samples(self) -> Numbers:
        """Micro-batch without checkpointing that has as many bytes of activations."""
        result: Numbers = self.micro_batch * self.activations
        return result

    def take(self, index: Any) -> MemoryInputs:
        """Return the configurations at an index array."""
        return MemoryInputs(**{field_.name: getattr(self, field_.name)[index] for field_ in fields(self)})


def knob_similarity(a: Numbers, b: Numbers) -> Numbers:
    """Return the share of equal knobs between rows of ``a`` and ``b``, shape (len(a), len(b))."""
    total = np.zeros((len(a), len(b)))
    for first, other in zip(a.T, b.T, strict=True):
        total += first[:, None] == other[None, :]
    result: Numbers = total / max(1, a.shape[1])
    return result


def sum_by_structure(observed: Numbers, weights: Numbers, queried: Numbers) -> Numbers:
    """Return for each queried structure the sum of the weights of equal observed structures."""
    count = 1 + int(max(observed.max(initial=0), queried.max(initial=0)))
    result: Numbers = np.bincount(observed, weights, minlength=count)[queried]
    return result


def sum_by_knob(
    structure: Numbers, knobs: Numbers, weights: Numbers, queried_structure: Numbers, queried_knobs: Numbers
) -> Numbers:
    """Return the sums of weights times the share of equal knobs, within the same structure.

    Equals ``(knob_similarity(queried_knobs, knobs) * same_structure) @ weights``, without building the matrix.
    """
    total = np.zeros(len(queried_structure))
    for known, other in zip(knobs.T, queried_knobs.T, strict=True):
        values = 1 + int(max(known.max(initial=0), other.max(initial=0)))
        total += sum_by_structure(structure * values + known, weights, queried_structure * values + other)
    result: Numbers = total / max(1, knobs.shape[1])
    return result


def normal_cdf(z: Numbers) -> Numbers:
    """Return the standard normal distribution function (logistic approximation by Bowling et al. 2009, error 1e-4)."""
    clipped = np.clip(z, -8.0, 8.0)
    result: Numbers = 1 / (1 + np.exp(-(0.07056 * clipped**3 + 1.5976 * clipped)))
    return result


class MemoryPosterior:
    """Posterior of peaks and usable memory; ``bytes_per_sample`` are profiled, ``on_cpu`` has no CUDA context."""

    def __init__(self, *, device_bytes: int, bytes_per_sample: int, on_cpu: bool) -> None:
        self._device = float(device_bytes)
        self._noise_variance = (_NOISE_SD * self._device) ** 2
        """Variance of a measured peak, in bytes squared."""
        self._slope = float(bytes_per_sample)
        self.usable = self._device * (1 - _FRAGMENTATION) - (0.0 if on_cpu else _CONTEXT_BYTES)
        """Prior mean of the largest possible peak, in bytes."""
        spread = math.hypot(_FRAGMENTATION_SD * self._device, 0.0 if on_cpu else _CONTEXT_SD_BYTES)
        self._limit_variance = spread**2
        self._inputs: MemoryInputs | None = None
        self._one_sided: Numbers = np.zeros(0)
        self._weights: Numbers = np.zeros(0)
        self._inverse: Numbers = np.zeros((0, 0))
        self._ran = 0.0
        """Largest measured peak: a lower bound of the usable memory."""
        self.error_factor = 1.0
        """Factor on the variance of the errors that structures share, learnt from the peaks."""
        self.unexplained = math.inf
        """Least micro-batch that ran out of memory to surprise, with an expected peak hardly above one that ran."""
        self._doubts: Numbers = np.zeros(0)
        """Factors on the variance of each structure's error, by index; 1 for indices beyond the end."""

    def observe(self, inputs: MemoryInputs, peaks: Numbers, out_of_memory: Numbers) -> None:
        """Condition on all launches so far, replacing earlier ones; ``peaks`` in bytes, NaN if not measured."""
        measured = np.flatnonzero(~np.isnan(peaks) & ~out_of_memory)
        # A launch that ran gives two observations: its peak, and that its memory is within the limit.
        informative = out_of_memory | np.isnan(peaks) | (peaks > _INFORMATIVE_SHARE * self.usable)
        sides = np.flatnonzero(informative)
        nearest = np.argsort(np.abs(self._predicted(inputs.take(sides)) - self.usable), kind="stable")
        sides = np.sort(sides[nearest[:_MAX_ONE_SIDED]])
        index = np.concatenate([measured, sides])
        one_sided = np.arange(len(index)) >= len(measured)
        all_inputs = inputs.take(index)
        lost = _NON_CONTIGUOUS_LOSS * self._device * all_inputs.non_contiguous * one_sided
        predicted = self._predicted(all_inputs) + lost
        self._ran = float(peaks[measured].max(initial=0.0))
        exact_inputs = inputs.take(measured)
        errors = peaks[measured] - self._predicted(exact_inputs)
        self.error_factor = self._likeliest_factor(exact_inputs, errors)
        self._count_surprises(inputs.take(out_of_memory), exact_inputs, errors)
        prior = self._covariance(all_inputs, all_inputs)
        prior += self._loss_covariance(all_inputs, all_inputs) * np.outer(one_sided, one_sided)
        noise = self._noise_variance
        exact, rest = slice(0, len(measured)), slice(len(measured), None)
        gains = np.linalg.solve(prior[exact, exact] + noise * np.eye(len(measured)), prior[exact, rest]).T
        mean = predicted[rest] + gains @ (peaks[measured] - predicted[exact])
        side_values, side_variances = _propagated(
            mean, prior[rest, rest] - gains @ prior[exact, rest], self.usable, out_of_memory[sides]
        )
        values = np.concatenate([peaks[measured], side_values])
        # Equal launches that contradict a measured peak would make the matrix singular.
        variances = np.concatenate([np.full(len(measured), noise), np.maximum(side_variances, _LEAST_SHARE * noise)])
        used = np.isfinite(variances)
        self._inputs = all_inputs.take(used)
        self._one_sided = one_sided[used].astype(np.float64)
        self._inverse = np.linalg.inv(prior[np.ix_(used, used)] + np.diag(variances[used]))
        self._weights = self._inverse @ (values - predicted)[used]

    def _likeliest_factor(self, inputs: MemoryInputs, errors: Numbers) -> float:
        """Return the most likely factor on the variance of the shared errors, given measured errors."""
        if not len(errors):
            return 1.0
        shared = self._structures_covariance(inputs, inputs)
        rest = self._covariance(inputs, inputs, error_factor=0.0) + self._noise_variance * np.eye(len(errors))

        def density(factor: float) -> float:
            root = np.linalg.cholesky(rest + factor * shared)
            fit = float((np.linalg.solve(root, errors) ** 2).sum()) + 2 * float(np.log(np.diag(root)).sum())
            return -0.5 * (fit + (math.log(factor) / _ERROR_LOG_SD) ** 2)

        return max(_ERROR_FACTORS, key=density)

    def _structures_covariance(self, a: MemoryInputs, b: MemoryInputs) -> Numbers:
        """Return the covariance of the errors shared by structures, at a factor of 1."""
        result = np.full((len(a.lineage), len(b.lineage)), _SHARED_SD**2)
        result += _STRUCTURE_SD**2 * (a.structure[:, None] == b.structure[None, :])
        for place, spread in enumerate(_RELATIVE_SDS):
            result += spread**2 * (a.relatives[:, place, None] == b.relatives[None, :, place])
        return self._device**2 * result

    def _count_surprises(self, out_of_memory: MemoryInputs, measured: MemoryInputs, errors: Numbers) -> None:
        """Widen the uncertainty after launches ran out of memory although confidently predicted to fit.

        The limit becomes less certain, unless a peak above the prediction was measured: then the formulas are wrong
        about the structure.
        """
        shared = self._covariance(out_of_memory, measured)
        noise = self._noise_variance * np.eye(len(errors))
        gains = np.linalg.solve(self._covariance(measured, measured) + noise, shared.T).T
        variance = self._variance(out_of_memory) - (gains * shared).sum(axis=1)
        spread = np.sqrt(np.maximum(variance, 0.0) + self._limit_variance)
        expected = self._predicted(out_of_memory) + gains @ errors
        surprising = expected < self.usable - _SURPRISE_SIGMAS * spread
        of_limit = surprising & (expected >= self._ran)
        unexplained = surprising & (expected <= _CLOSE * self._ran)
        self.unexplained = float(out_of_memory.micro_batch[unexplained].min(initial=math.inf))
        doubted = np.bincount(out_of_memory.structure[surprising & ~of_limit])
        self._limit_variance *= 4.0 ** min(_MAX_SURPRISES, int(of_limit.sum()))
        self._doubts = 4.0 ** np.minimum(_MAX_STRUCTURE_SURPRISES, doubted)

    def _doubt(self, structure: Numbers) -> Numbers:
        """Return the additional variances of structures' errors due to surprises, relative to the device's memory."""
        factors = np.append(self._doubts, 1.0)[np.minimum(structure, len(self._doubts))]
        result: Numbers = _STRUCTURE_SD**2 * np.maximum(0.0, factors - self.error_factor)
        return result

    def peaks(self, inputs: MemoryInputs) -> Numbers:
        """Return the posterior mean peaks in bytes, without the lineages' part: fast for many configurations."""
        return self._predicted(inputs) + self._correction(inputs)

    def _correction(self, inputs: MemoryInputs) -> Numbers:
        """Return the posterior mean error of the formulas, without the lineages' part."""
        constant, slope, hidden = self._correction_line(inputs)
        result: Numbers = constant + slope * inputs.samples + hidden * self._hidden(inputs)
        return result

    def _hidden(self, inputs: MemoryInputs) -> Numbers:
        """Return the bytes of activations omitted from the formulas, because another moment of the step needs more."""
        result: Numbers = np.clip(inputs.others - inputs.forward, 0, self._slope * inputs.samples)
        return result

    def _correction_line(self, inputs: MemoryInputs) -> tuple[Numbers, Numbers, float]:
        """Return the correction as a constant, bytes per sample, and the share of the hidden activations."""
        observed, weights = self._inputs, self._weights
        if observed is None or not len(weights):
            return np.zeros(len(inputs.lineage)), np.zeros(len(inputs.lineage)), 0.0
        samples = self._slope * observed.samples
        by_structure = sum_by_structure(observed.structure, weights, inputs.structure)
        constant = _SHARED_SD**2 * weights.sum() + _STRUCTURE_SD**2 * by_structure
        for place, spread in enumerate(_RELATIVE_SDS):
            constant += spread**2 * sum_by_structure(observed.relatives[:, place], weights, inputs.relatives[:, place])
        constant *= self.error_factor
        constant += self._doubt(inputs.structure) * by_structure
        constant += _KNOBS_SD**2 * sum_by_knob(
            observed.structure, observed.knobs, weights, inputs.structure, inputs.knobs
        )
        buffers: Numbers = _BUFFER_SD**2 * inputs.buffers @ (observed.buffers.T @ weights)
        slopes = _STRUCTURE_SLOPE_SD**2 * sum_by_structure(observed.structure, weights * samples, inputs.structure)
        hidden = min(1.0, max(0.0, _HIDDEN_SD**2 * float(weights @ self._hidden(observed))))
        return self._device**2 * constant + buffers, self._slope * (_SLOPE_SD**2 * (weights @ samples) + slopes), hidden

    @property
    def limit(self) -> float:
        """Posterior mean of the largest possible peak, in bytes."""
        return max(self._ran, self._believed_limit())

    def _believed_limit(self) -> float:
        return self.usable - self._limit_variance * float(self._one_sided @ self._weights)

    def largest(self, inputs: MemoryInputs, limit: float) -> Numbers:
        """Return the largest micro-batches whose posterior mean peak is within ``limit`` bytes, 0 if 1 is not."""
        constant, slope, hidden = self._correction_line(inputs)
        above = np.maximum(0.0, inputs.others - inputs.forward)
        crossing = above / max(1.0, self._slope)
        room = (limit - inputs.forward - constant - hidden * above) / np.maximum(1.0, self._slope + slope)
        below = (limit - inputs.others - constant) / np.maximum(1.0, hidden * self._slope + slope)
        result = np.where(room >= crossing, room, np.minimum(below, crossing)) / inputs.activations
        result = np.where(inputs.others + constant > limit, 0, np.floor(np.clip(result, 0, 2**31)))
        return result.astype(np.int64)

    def predict(self, inputs: MemoryInputs) -> tuple[Numbers, Numbers, Numbers]:
        """Return for each configuration the posterior mean peak, and mean and standard deviation of the free memory.

        All in bytes. Free memory is the limit less the peak and the losses; a configuration fits if it is positive.
        """
        predicted = self._predicted(inputs)
        prior = (
            self._variance(inputs)
            + self._limit_variance
            + (_NON_CONTIGUOUS_LOSS_SD * self._device * inputs.non_contiguous) ** 2
        )
        lost = _NON_CONTIGUOUS_LOSS * self._device * inputs.non_contiguous
        observed = self._inputs
        if observed is None or not len(self._weights):
            return predicted, self.usable - predicted - lost, np.sqrt(prior)
        shared = self._covariance(inputs, observed)
        cross = shared + self._loss_covariance(inputs, observed) * self._one_sided
        free = self.usable - predicted - lost - cross @ self._weights + max(0.0, self._ran - self._believed_limit())
        variance = prior - np.einsum("ij,jk,ik->i", cross, self._inverse, cross, optimize=True)
        return predicted + shared @ self._weights, free, np.sqrt(np.maximum(variance, 1.0))

    def _predicted(self, inputs: MemoryInputs) -> Numbers:
        result: Numbers = np.maximum(inputs.forward + self._slope * inputs.samples, inputs.others)
        return result

    def _covariance(self, a: MemoryInputs, b: MemoryInputs, *, error_factor: float | None = None) -> Numbers:
        """Return the covariance of the formulas' errors; ``error_factor`` defaults to the learnt factor."""
        factor = self.error_factor if error_factor is None else error_factor
        same = a.structure[:, None] == b.structure[None, :]
        samples = np.outer(self._slope * a.samples, self._slope * b.samples)
        scale = self._device**2
        result: Numbers = samples * (_SLOPE_SD**2 + _STRUCTURE_SLOPE_SD**2 * same)
        result += factor * self._structures_covariance(a, b) + scale * self._doubt(a.structure)[:, None] * same
        result += scale * _KNOBS_SD**2 * knob_similarity(a.knobs, b.knobs) * same
        octaves = np.log2(np.maximum(a.micro_batch, 1))[:, None] - np.log2(np.maximum(b.micro_batch, 1))
        result += samples * _CURVE_SD**2 * np.exp(-0.5 * (octaves / _CURVE_WIDTH) ** 2)
        result += _BUFFER_SD**2 * a.buffers @ b.buffers.T + _HIDDEN_SD**2 * np.outer(self._hidden(a), self._hidden(b))
        result += scale * _LINEAGE_SD**2 * (a.lineage[:, None] == b.lineage[None, :])
        return result

    def _loss_covariance(self, a: MemoryInputs, b: MemoryInputs) -> Numbers:
        """Return the covariance of the memory lost to context and fragmentation."""
        non_contiguous = np.outer(a.non_contiguous, b.non_contiguous)
        result: Numbers = self._limit_variance + (_NON_CONTIGUOUS_LOSS_SD * self._device) ** 2 * non_contiguous
        return result

    def _variance(self, inputs: MemoryInputs) -> Numbers:
        structures = _SHARED_SD**2 + _STRUCTURE_SD**2 + sum(spread**2 for spread in _RELATIVE_SDS)
        errors = self.error_factor * structures + self._doubt(inputs.structure) + _KNOBS_SD**2 + _LINEAGE_SD**2
        result: Numbers = (self._slope * inputs.samples) ** 2 * (
            _SLOPE_SD**2 + _STRUCTURE_SLOPE_SD**2 + _CURVE_SD**2
        ) + errors * self._device**2
        result += _BUFFER_SD**2 * (inputs.buffers**2).sum(axis=1) + _HIDDEN_SD**2 * self._hidden(inputs) ** 2
        return result


def _propagated(mean: Numbers, covariance: Numbers, limit: float, above: Numbers) -> tuple[Numbers, Numbers]:
    """Return the measurements equivalent to one-sided observations: values, and variances (infinite if uninformative).

    ``mean`` and ``covariance`` are the prior of the launches' memory, in bytes; ``above`` tells which were above
    ``limit``.
    """
    values, noises = mean.copy(), np.full(len(mean), math.inf)
    for _ in range(_SWEEPS):
        for row, side in enumerate(above):
            variance = float(covariance[row, row])
            precision = max(1 / variance - 1 / noises[row], _LEAST_SHARE / variance)
            without = (mean[row] / variance - values[row] / noises[row]) / precision
            result = _equivalent_measurement(float(without), 1 / precision, limit, above=bool(side))
            value, noise = (values[row], math.inf) if result is None else result
            more = 1 / noise - 1 / noises[row]
            moved = value / noise - values[row] / noises[row] - more * mean[row]
            gain = covariance[:, row] / (1 + more * variance)
            mean = mean + gain * moved
            covariance = covariance - more * np.outer(gain, covariance[row])
            values[row], noises[row] = value, noise
    return values, noises


def _equivalent_measurement(mean: float, variance: float, limit: float, *, above: bool) -> tuple[float, float] | None:
    """Return value and variance of the measurement equivalent to a side of the limit; None if uninformative."""
    spread = math.sqrt(max(variance, 1.0))
    sign = 1.0 if above else -1.0
    z = sign * (mean - limit) / spread
    if z > _UNINFORMATIVE_SIGMAS:
        return None
    z = max(z, -6.0)
    normal = NormalDist()
    hazard = normal.pdf(z) / normal.cdf(z)
    shrunk = 1 - hazard * (hazard + z)
    shrunk = min(max(shrunk, 1e-3), 0.999)
    updated = mean + sign * spread * hazard
    noise = variance * shrunk / (1 - shrunk)
    return updated + (updated - mean) * noise / variance, noise
