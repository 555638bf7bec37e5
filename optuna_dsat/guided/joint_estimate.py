"""Joint estimate of the finalists from search and rounds.

Three rounds distinguish finalists no better than the noise allows. The posterior of a method uses all launches of the
search, neighbours included. Both are weighted by their certainty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optuna_dsat.config.record import Record

_LEAST_NOISE = 1e-3
"""Lower bound of the relative standard deviation between equal launches: few rounds may agree by chance."""


@dataclass(frozen=True, kw_only=True)
class JointEstimate(Record):
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
        if not all(map(math.isfinite, [*self.means, *(item for row in self.covariance for item in row)])):
            raise ValueError("means and covariances are finite numbers")

    def given(self, values: Mapping[int, Mapping[int, float]], *, noise: float, maximize: bool) -> JointEstimate:
        """Return the distribution conditioned on rounds (trial -> round -> metric), each with an unknown effect.

        Bayesian linear regression (Bishop 2006, section 3.3) with a flat prior on each round's effect. If the rounds
        contradict this distribution, such as on a machine whose launches differ more than the search had seen, its
        covariance is first multiplied by their chi-squared per degree of freedom (Birge, Phys. Rev. 40, 207, 1932).
        """
        count, variance = len(self.numbers), max(noise, _LEAST_NOISE) ** 2
        precision, weighted = np.zeros((count, count)), np.zeros(count)
        for item in {value for number in self.numbers for value in values.get(number, {})}:
            ran = np.array([item in values.get(number, {}) for number in self.numbers])
            logs = np.array([math.log(values[number][item]) for number in np.array(self.numbers)[ran]])
            precision[np.ix_(ran, ran)] += (np.eye(len(logs)) - 1 / len(logs)) / variance
            weighted[ran] += (logs - logs.mean()) * (1 if maximize else -1) / variance
        prior = np.array(self.covariance)
        gap = weighted - precision @ self.means
        spread = np.linalg.pinv(precision + precision @ prior @ precision, hermitian=True)
        degrees = np.linalg.matrix_rank(precision, hermitian=True)
        prior *= max(1.0, float(gap @ spread @ gap) / max(1, degrees))
        gained = np.eye(count) + prior @ precision
        means = np.linalg.solve(gained, np.array(self.means) + prior @ weighted)
        covariance = np.linalg.solve(gained, prior)
        return JointEstimate(
            numbers=self.numbers,
            means=tuple(means.tolist()),
            covariance=tuple(tuple(row) for row in covariance.tolist()),
        )

    def among(self, numbers: Sequence[int]) -> JointEstimate:
        """Return the marginal distribution of some of these trials."""
        places = [self.numbers.index(number) for number in numbers]
        return JointEstimate(
            numbers=tuple(numbers),
            means=tuple(self.means[place] for place in places),
            covariance=tuple(tuple(self.covariance[row][place] for place in places) for row in places),
        )

    def log_ratio(self, number: int, other: int) -> tuple[float, float]:
        """Return the log ratio of two trials and its standard deviation; positive if the first is better."""
        first, two = self.numbers.index(number), self.numbers.index(other)
        of = self.covariance
        variance = of[first][first] + of[two][two] - of[first][two] - of[two][first]
        return self.means[first] - self.means[two], math.sqrt(max(0.0, variance))
