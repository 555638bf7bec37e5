"""Remaining gain of a search, estimated by draws from the joint posterior of its configurations."""

from __future__ import annotations

import math
import random

import numpy as np

from optuna_dsat.cost.numbers import Numbers, descending, without_rounding_error

_DRAWS, _SURE = 256, 0.9
"""Draws of the joint posterior, and the quantile of the remaining gain."""


class Prospects:
    """Possible gain over the incumbent, in the metric's logarithm.

    Args:
        means: Posterior means of the log objectives of n configurations, unmeasured configurations first.
        covariance: Covariance of the log objectives, without noise, shape (n, n).
        runs: Probability of each unmeasured configuration to run; configurations near the edge of memory run or fail
            together.
        held: Index of the incumbent.
        noise_variance: Noise variance of a measurement.
        index: Index of each unmeasured configuration, as returned by ``draw``; None to count them.
    """

    def __init__(
        self,
        means: Numbers,
        covariance: Numbers,
        *,
        runs: Numbers,
        held: int,
        noise_variance: float,
        index: Numbers | None = None,
    ) -> None:
        self._means, self._covariance, self._held = means, covariance, held
        self.noise_variance = noise_variance
        self._unmeasured = len(runs)
        self._index = np.arange(len(runs)) if index is None else index
        values, vectors = np.linalg.eigh(covariance)
        normal = np.random.default_rng(0).standard_normal((_DRAWS, len(means)))
        root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T  # symmetric: no matter which eigenvectors
        self._draws = without_rounding_error(means + normal @ root)
        chances = np.concatenate([runs, np.ones(len(means) - len(runs))])
        self._runs = chances > np.random.default_rng(1).random((_DRAWS, 1))

    def remaining(self) -> float:
        """Return the 90% quantile of the best configuration's gain."""
        gain = np.where(self._runs, self._draws - self._draws[:, [self._held]], 0.0)
        return float(np.quantile(gain.max(axis=1), _SURE))

    def draw(self, rng: random.Random) -> int:
        """Return the index of the best unmeasured configuration of a random draw."""
        number = rng.randrange(_DRAWS)
        hopes = self._draws[number] - 1e3 * ~self._runs[number]
        return int(self._index[np.argmax(hopes[: self._unmeasured])])

    def worth_of_launches(self, launches: int) -> float:
        """Return the expected gain of some launches together.

        Each launch runs the best configuration of a draw (parallel Thompson sampling, Kandasamy et al. 2018) and is
        measured with noise. The new incumbent has the best posterior mean (the knowledge gradient of a batch, Wu and
        Frazier 2016).
        """
        hopes = np.where(self._runs, self._draws, -np.inf)[:, : self._unmeasured]
        best = descending(hopes)[:, :launches].T.ravel()
        chosen = np.array(list(dict.fromkeys(best.tolist()))[:launches], dtype=np.int64)
        shared = self._covariance[chosen]
        learnt = np.linalg.solve(shared[:, chosen] + self.noise_variance * np.eye(len(chosen)), shared)
        errors = np.random.default_rng(2).standard_normal((_DRAWS, len(chosen))) * math.sqrt(self.noise_variance)
        means = self._means + (self._draws[:, chosen] + errors - self._means[chosen]) @ learnt
        known = np.arange(len(means[0])) >= self._unmeasured
        known[chosen] = True
        result = np.where(self._runs & known, means, -np.inf).max(axis=1)
        return float(result.mean() - self._means[self._held])
