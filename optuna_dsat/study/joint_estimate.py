"""What the search and the rounds together say of the finalists.

Three rounds tell finalists apart by no better than the noise; a method with a posterior knows of each what all launches
of its search say of it, neighbours included. Both count by how sure they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["JointEstimate"]

_LEAST_NOISE = 1e-3
"""Relative standard deviation that launches of one configuration differ by at least: few rounds may agree by chance."""


@dataclass(frozen=True, kw_only=True)
class JointEstimate:
    """Normal distribution of n trials' log objectives, without noise: logarithms of the metric, larger is better."""

    numbers: tuple[int, ...]
    """Numbers of the trials."""
    means: tuple[float, ...]
    """Shape (n,)."""
    covariance: tuple[tuple[float, ...], ...]
    """Shape (n, n)."""

    def __post_init__(self) -> None:
        count = len(self.numbers)
        if len(self.means) != count or [len(row) for row in self.covariance] != [count] * count:
            raise ValueError(f"an estimate of {count} trials has {count} means and {count} x {count} covariances")
        if not all(map(math.isfinite, [*self.means, *(one for row in self.covariance for one in row)])):
            raise ValueError("means and covariances are finite numbers")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> JointEstimate:
        """Build from the output of ``to_json``.

        Raises:
            ValueError: If shapes do not agree, or a number is not finite.
        """
        return cls(
            numbers=tuple(map(int, record["numbers"])),
            means=tuple(map(float, record["means"])),
            covariance=tuple(tuple(map(float, row)) for row in record["covariance"]),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the input of ``from_json``."""
        return asdict(self)

    def given(self, values: Mapping[int, Mapping[int, float]], *, noise: float, maximize: bool) -> JointEstimate:
        """Return the distribution given launches in rounds; what all launches of a round have in common is unknown.

        Bayesian linear regression (Bishop 2006, section 3.3) with a flat prior on each round's effect.

        Args:
            values: Trial -> round -> metric; of other trials than these nothing is learnt.
            noise: Relative standard deviation from launch to launch.
            maximize: Whether a larger metric is better.
        """
        count, variance = len(self.numbers), max(noise, _LEAST_NOISE) ** 2
        precision, weighted = np.zeros((count, count)), np.zeros(count)
        for one in {one for number in self.numbers for one in values.get(number, {})}:
            ran = np.array([one in values.get(number, {}) for number in self.numbers])
            logs = np.array([math.log(values[number][one]) for number in np.array(self.numbers)[ran]])
            precision[np.ix_(ran, ran)] += (np.eye(len(logs)) - 1 / len(logs)) / variance
            weighted[ran] += (logs - logs.mean()) * (1 if maximize else -1) / variance
        prior = np.array(self.covariance)
        gained = np.eye(count) + prior @ precision
        means = np.linalg.solve(gained, np.array(self.means) + prior @ weighted)
        covariance = np.linalg.solve(gained, prior)
        return JointEstimate(
            numbers=self.numbers,
            means=tuple(means.tolist()),
            covariance=tuple(tuple(row) for row in covariance.tolist()),
        )

    def among(self, numbers: Sequence[int]) -> JointEstimate:
        """Return the distribution of some of these trials."""
        places = [self.numbers.index(number) for number in numbers]
        return JointEstimate(
            numbers=tuple(numbers),
            means=tuple(self.means[place] for place in places),
            covariance=tuple(tuple(self.covariance[row][place] for place in places) for row in places),
        )

    def log_ratio(self, number: int, other: int) -> tuple[float, float]:
        """Return by how much a trial is better than another, as a logarithm, with its standard deviation.

        Args:
            number: Number of the trial.
            other: Number of the other.
        """
        one, two = self.numbers.index(number), self.numbers.index(other)
        of = self.covariance
        variance = of[one][one] + of[two][two] - of[one][two] - of[two][one]
        return self.means[one] - self.means[two], math.sqrt(max(0.0, variance))
