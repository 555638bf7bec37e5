"""Effects of structures, micro-batches and knobs on the metric: a Gaussian process over all measured lineages.

The logarithm of the metric is a sum of independent parts (Duvenaud et al. 2011, arXiv:1112.4394): a smooth curve over
the logarithm of the micro-batch, a deviation from it for each structure (ZeRO stage and offload), and an effect of
each knob, half of which is shared by all ZeRO stages. Close sizes have similar effects. The variances of structures and
knobs, and the noise between launches, are chosen from a few values by maximum likelihood. This separates the effects: a
choice observed in a single bad lineage only is not blamed for it, and a choice without a measured effect does not
justify another launch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from optuna.study import StudyDirection

from optuna_dsat.trials.lineage import STRUCTURE, ZERO_STAGE, Lineage
from optuna_dsat.trials.lineage_index import Lineages, StructureGroup

__all__ = ["Choices", "Effects", "Measurement", "Scales", "effects_of"]

Array = NDArray[np.float64]
Choices = Mapping[str, Sequence[Any]]
"""Choices of knobs by name."""

_LEAST_MEASUREMENTS = 3
_BEST, _LATEST = 50, 50
"""Number of measurements used: the best, and the latest."""
_CURVE, _CURVE_OCTAVES = 1.5, 2.5
"""Standard deviation (of the logarithm) of the curve over the micro-batch, and the octaves over which it is smooth."""
_OWN_CURVE, _OWN_OCTAVES = 0.3, 3.0
"""The same for a structure's deviation from the curve, relative to the differences between structures."""
_STAGE, _OFFLOAD = 0.2, 0.2
"""Shares of a structure's variance shared with structures of the same ZeRO stage, and of the same offloads."""
_PER_OCTAVE = 0.03
"""Standard deviation of the error of a launch's evidence, per octave between its micro-batch and the best."""
_DRAWS = 48
_LEAST_GAIN = 0.005
"""Relative gain below which beating the best measurement does not count."""


class Measurement(NamedTuple):
    """A measured launch."""

    number: int
    """Number of the trial."""
    params: Mapping[str, Any]
    """The knobs, without the micro-batch."""
    micro_batch: int
    goodness: float
    """Logarithm of the metric, larger is better; NaN without a metric."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Standard deviations of the logarithm of the metric."""

    structure: float
    """Between structures."""
    knob: float
    """Between choices of a knob."""
    noise: float
    """From launch to launch."""


_SCALES = tuple(
    Scales(structure=structure, knob=knob, noise=noise)
    for structure in (0.1, 0.3)
    for knob in (0.01, 0.04, 0.12)
    for noise in (0.007, 0.02, 0.05)
)


class Effects:
    """Posterior of the effects on the logarithm of the metric, larger is better.

    Args:
        measurements: At least one measurement, each with a finite goodness.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._params = [measurement.params for measurement in measurements]
        self.best_size = max(measurements, key=lambda measurement: measurement.goodness).micro_batch
        """Micro-batch of the best measurement."""
        self._octaves = np.log2([measurement.micro_batch for measurement in measurements])
        goodness = np.array([measurement.goodness for measurement in measurements])
        targets = goodness - goodness.max()
        structures = self._structural(self._params, self._octaves)
        knobs = np.zeros_like(structures)
        for name in sorted({name for params in self._params for name in params if name not in STRUCTURE}):
            knobs += self._alike(name, self._params)
        curve = _level_and_curve(self._octaves, self._octaves)
        far = (_PER_OCTAVE * (self._octaves - math.log2(self.best_size))) ** 2
        fits = [(*_fit(_covariance(curve, structures, knobs, far, scales), targets), scales) for scales in _SCALES]
        self._inverse, self._weights, _, self.scales = max(fits, key=lambda fit: fit[2])
        self._best = float(np.max(targets - (self.scales.noise**2 + far) * self._weights))

    def draw(self, rng: random.Random, name: str, choices: Sequence[Any], params: Mapping[str, Any]) -> Sequence[float]:
        """Draw the effect of each choice of a knob (Thompson 1933).

        A choice has the largest draw with the probability that it is the best.

        Args:
            rng: Random generator.
            name: The knob.
            choices: Choices of the knob.
            params: The knobs chosen before, the ZeRO stage among them.
        """
        return [float(value) for value in _draws(rng, *self._choices(name, choices, params), count=1)[0]]

    def better(self, name: str, usual: Any, choices: Sequence[Any], params: Mapping[str, Any]) -> Any:
        """Return the best choice of a knob, or the usual choice unless it is beaten by more than the uncertainty.

        Args:
            name: The knob.
            usual: One of the choices.
            choices: Choices of the knob.
            params: The knobs chosen before, the ZeRO stage among them.
        """
        mean, covariance = self._choices(name, choices, params)
        best, own = int(np.argmax(mean)), list(choices).index(usual)
        doubt = math.sqrt(max(0.0, covariance[best, best] + covariance[own, own] - 2 * covariance[best, own]))
        return choices[best] if mean[best] - mean[own] > doubt else usual

    def expected_gain(
        self, rng: random.Random, structure: Mapping[str, Any], micro_batch: int, knobs: Choices
    ) -> float:
        """Return the expected relative gain of a structure, with its best knobs, over the best measured configuration.

        The mean over draws of the improvement on the best measurement without noise (expected improvement, Jones et al.
        1998), relative to that measurement.

        Args:
            rng: Random generator.
            structure: ZeRO stage and offloads.
            micro_batch: Samples per rank.
            knobs: Choices of the other knobs.
        """
        rows = [(name, choice) for name, choices in knobs.items() for choice in choices]
        octave = np.array([math.log2(micro_batch)])
        cross = np.zeros((1 + len(rows), len(self._params)))
        prior = np.zeros((1 + len(rows), 1 + len(rows)))
        variance = self.scales.structure**2
        cross[:1] = variance * self._structural([structure], octave)
        cross[:1] += _CURVE**2 * _level_and_curve(octave, self._octaves)
        prior[0, 0] = variance * (1 + _OWN_CURVE**2) + 2 * _CURVE**2
        parts, at = [], 1
        for name, choices in knobs.items():
            part = slice(at, at + len(choices))
            cross[part], prior[part, part] = self._knob(name, choices, structure)
            parts.append(part)
            at = part.stop
        drawn = _draws(rng, cross @ self._weights, prior - cross @ self._inverse @ cross.T, count=_DRAWS)
        total = drawn[:, 0] + sum(drawn[:, part].max(axis=1) for part in parts)
        return float(np.mean(np.maximum(total - self._best - _LEAST_GAIN, 0.0)))

    def _choices(self, name: str, choices: Sequence[Any], params: Mapping[str, Any]) -> tuple[Array, Array]:
        """Return mean (choices,) and covariance (choices, choices) of the effects of a knob's choices."""
        cross, prior = self._knob(name, choices, params)
        return cross @ self._weights, prior - cross @ self._inverse @ cross.T

    def _knob(self, name: str, choices: Sequence[Any], params: Mapping[str, Any]) -> tuple[Array, Array]:
        """Return prior covariances of a knob's effects with the measurements and among each other."""
        variance = self.scales.knob**2
        cross = self._alike(name, [{**params, name: choice} for choice in choices])
        return variance * cross, variance * _table(_similar, choices, choices)

    def _structural(self, others: Sequence[Mapping[str, Any]], octaves: Array) -> Array:
        """Return the correlation of other structures with the measured structures: shape (others, measurements)."""
        same = _table(
            _same_structure, [_structure(record) for record in others], [_structure(param) for param in self._params]
        )
        own = _OWN_CURVE**2 * _smooth(octaves, self._octaves, _OWN_OCTAVES)
        return np.asarray(same + (same == 1.0) * own, dtype=np.float64)

    def _alike(self, name: str, others: Sequence[Mapping[str, Any]]) -> Array:
        """Return the correlation of a knob's effects on others and on measured lineages, (others, measurements)."""
        stage = _table(
            _equal, [record.get(ZERO_STAGE) for record in others], [param.get(ZERO_STAGE) for param in self._params]
        )
        values = [(param.get(name),) if name in param else () for param in (*others, *self._params)]
        return _table(_both_similar, values[: len(others)], values[len(others) :]) * (0.5 + 0.5 * stage)


def effects_of(lineages: Lineages, direction: StudyDirection) -> Effects | None:
    """Return the effects in the measured lineages, None with too few measurements or if a metric is not positive."""

    def find() -> Effects | None:
        measurements = [
            measurement for group in lineages.structures.values() for measurement in _chosen_of(group, direction)
        ]
        if len(measurements) < _LEAST_MEASUREMENTS or not all(
            math.isfinite(measurement.goodness) for measurement in measurements
        ):
            return None
        return Effects(_chosen(measurements))

    return lineages.derived(("effects", direction), find)


def _chosen_of(group: StructureGroup, direction: StudyDirection) -> Sequence[Measurement]:
    def find() -> Sequence[Measurement]:
        return _chosen(
            [measurement for lineage in group.members.values() for measurement in _measurements(lineage, direction)]
        )

    return group.derived(("measurements", direction), find)


def _chosen(found: Sequence[Measurement]) -> Sequence[Measurement]:
    """Return the best and the latest measurements, by number, and all measurements without a goodness."""
    by_number = sorted(found, key=lambda measurement: measurement.number)
    if len(found) <= _BEST + _LATEST:
        return by_number
    best = sorted(
        found, key=lambda measurement: -math.inf if math.isnan(measurement.goodness) else -measurement.goodness
    )[:_BEST]
    chosen = {measurement.number: measurement for measurement in (*best, *by_number[-_LATEST:])}
    return [chosen[number] for number in sorted(chosen)]


def _measurements(lineage: Lineage, direction: StudyDirection) -> Sequence[Measurement]:
    sign = 1 if direction == StudyDirection.MAXIMIZE else -1

    def find() -> Sequence[Measurement]:
        return [
            Measurement(number, lineage.params, size, sign * math.log(value) if 0 < value < math.inf else math.nan)
            for number, size, value in lineage.measurements()
        ]

    return lineage.derived(("measurements", direction), find)


def _covariance(curve: Array, structures: Array, knobs: Array, far: Array, scales: Scales) -> Array:
    noise = np.diag(scales.noise**2 + far)
    return _CURVE**2 * curve + scales.structure**2 * structures + scales.knob**2 * knobs + noise


def _fit(covariance: Array, targets: Array) -> tuple[Array, Array, float]:
    """Return the inverse of the covariance, its product with the targets, and their logarithmic likelihood.

    Up to a constant (Rasmussen and Williams 2006, equation 2.30).
    """
    inverse = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
    weights = inverse @ targets
    _, determinant = np.linalg.slogdet(covariance)
    return inverse, weights, float(-0.5 * targets @ weights - 0.5 * determinant)


def _level_and_curve(octaves: Array, others: Array) -> Array:
    """Return the correlation of the metric over the micro-batch, including its level: shape (octaves, others)."""
    return 1.0 + _smooth(octaves, others, _CURVE_OCTAVES)


def _smooth(octaves: Array, others: Array, width: float) -> Array:
    return np.asarray(np.exp(-0.5 * ((octaves[:, None] - others[None, :]) / width) ** 2), dtype=np.float64)


def _draws(rng: random.Random, mean: Array, covariance: Array, *, count: int) -> Array:
    """Return draws of a normal distribution: shape (count, values)."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    normal = np.random.default_rng(rng.getrandbits(63)).standard_normal((count, len(mean)))
    return np.asarray(mean + (normal * np.sqrt(np.maximum(values, 0.0))) @ vectors.T, dtype=np.float64)


def _table(alike: Callable[[Any, Any], float], rows: Sequence[Any], columns: Sequence[Any]) -> Array:
    """Return ``alike`` of each row and column, calling it once for equal pairs."""
    numbers: dict[str, int] = {}
    distinct: list[Any] = []
    codes = []
    for value in (*rows, *columns):
        code = numbers.setdefault(repr(value), len(distinct))
        if code == len(distinct):
            distinct.append(value)
        codes.append(code)
    table = np.array([[alike(first, other) for other in distinct] for first in distinct], dtype=np.float64)
    return np.asarray(table[np.ix_(codes[: len(rows)], codes[len(rows) :])], dtype=np.float64)


def _structure(params: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return ZeRO stage and offloads."""
    return params.get(ZERO_STAGE), tuple(params.get(name, "none") for name in STRUCTURE if name != ZERO_STAGE)


def _same_structure(first: tuple[Any, Any], other: tuple[Any, Any]) -> float:
    stage, offload = first[0] == other[0], first[1] == other[1]
    return 1.0 if stage and offload else _STAGE * stage + _OFFLOAD * offload


def _equal(first: Any, other: Any) -> float:
    return float(first == other)


def _both_similar(first: tuple[Any, ...], other: tuple[Any, ...]) -> float:
    """Return the similarity of two values of a knob, given as tuples that are empty if the knob does not apply."""
    return _similar(first[0], other[0]) if first and other else 0.0


def _similar(first: Any, other: Any) -> float:
    """Return the similarity of two values of a knob: by ratio for sizes, by equality for others."""
    numbers = [value for value in (first, other) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == 2 and min(numbers) > 0:
        return math.exp(-abs(math.log10(numbers[0] / numbers[1])))
    return float(first == other and isinstance(first, bool) == isinstance(other, bool))
