"""Diagnosis of failed launches: a posterior over components of a configuration that fail whenever they are used.

Diagnosis of multiple faults (de Kleer and Williams 1987, "Diagnosing Multiple Faults"): a launch fails if at least one
of its components is faulty, and sometimes by chance. Components of a launch that ran are not faulty. Hypotheses are
sets of faulty components. The weight of a hypothesis is the product of the prior odds of its components and of the
probability of every failure that it does not explain. The number of hypotheses is exponential, so only the heaviest are
kept while components are added step by step (beam search).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optuna_dsat.cost.numbers import Numbers, descending

_STRUCTURE_FAULTY, _STAGES_FAULTY, _KNOB_FAULTY, _PAIR_FAULTY, _SIZE_FAULTY = 0.04, 0.01, 0.005, 0.002, 0.03
"""Prior probabilities of a fault of: a ZeRO stage, an offload or their combination; a stage and all above; a knob's
value; a knob's value in a single structure; and micro-batches larger than any that ran."""
_BY_CHANCE = 0.02
"""Probability that a launch fails without a faulty component."""
_HYPOTHESES, _MOST_FAULTY = 64, 12
"""Hypotheses kept per size, and the largest size."""


@dataclass(frozen=True, kw_only=True)
class Components:
    """Parts of configurations that may be faulty: stage, minimum stage, offloads, structure, and values of knobs."""

    numbers: Numbers
    """Component numbers of each row, shape (rows, k), padded with -1."""
    priors: Numbers
    """Prior probability that each component is faulty.

    The last component belongs to no row: a micro-batch larger than any that ran.
    """

    @classmethod
    def of(
        cls, stages: Numbers, relatives: Numbers, structure: Numbers, knobs: Numbers, *, has_value: Sequence[Numbers]
    ) -> Components:
        """Number the components of rows, by stage and structure (length rows), ``relatives`` and knobs.

        ``relatives`` are indices of ZeRO stage and offloads, shape (rows, 3), ``knobs`` of values, shape (rows, knobs);
        ``has_value`` tells for each knob which of its indices is a value (False if the knob is unset).
        """
        columns: list[Numbers] = []
        priors: list[Numbers] = []

        def add(index: Numbers, count: int, prior: float) -> None:
            columns.append(np.where(index < 0, -1, index + sum(len(item) for item in priors)))
            priors.append(np.full(count, prior))

        structures = int(structure.max(initial=-1)) + 1
        for index in (*relatives.T, structure):
            add(index, int(index.max(initial=-1)) + 1, _STRUCTURE_FAULTY)
        for place, known in enumerate(has_value):
            value = np.where(known[knobs[:, place]], knobs[:, place], -1)
            add(value, len(known), _KNOB_FAULTY)
            pair = np.where(value < 0, -1, structure * len(known) + value)
            add(pair, structures * len(known), _PAIR_FAULTY)
        for least in range(1, int(stages.max(initial=0)) + 1):
            add(np.where(stages >= least, 0, -1), 1, _STAGES_FAULTY)
        return cls(numbers=np.column_stack(columns), priors=np.append(np.concatenate(priors), _SIZE_FAULTY))


class Diagnosis:
    """Posterior over faulty components, given failed and successful launches and prior probabilities.

    ``failed`` and ``ran`` are component numbers of each launch, shape (launches, k), padded with -1.
    """

    def __init__(self, failed: Numbers, ran: Numbers, *, priors: Numbers) -> None:
        suspects = np.setdiff1d(failed, np.append(ran, -1))
        self._place = np.full(len(priors) + 1, len(suspects))  # the last entry is for -1
        self._place[suspects] = np.arange(len(suspects))
        self._sets, log_weights = _heaviest(self._suspects_of(failed), np.log(priors / (1 - priors))[suspects])
        weights = np.exp(log_weights - log_weights.max())
        self._weights = weights / weights.sum()

    def _suspects_of(self, components: Numbers) -> Numbers:
        """Return a mask of the suspects among the components of n launches, shape (n, suspects)."""
        result = np.zeros((len(components), int(self._place.max()) + 1), dtype=bool)
        np.put_along_axis(result, self._place[components], values=True, axis=1)
        return result[:, :-1]

    def probability_of(self, component: int) -> float:
        """Return the probability that a component is faulty; 0 if no failure suggests it."""
        place = self._place[component]
        return float(self._weights @ self._sets[:, place]) if place < self._sets.shape[1] else 0.0

    def runs(self, components: Numbers) -> Numbers:
        """Return each launch's probability that no component is faulty; components (n, k), padded with -1."""
        shared = self._suspects_of(components).astype(np.float64) @ self._sets.T
        result: Numbers = (shared == 0) @ self._weights
        return result


def _heaviest(failed: Numbers, log_odds: Numbers) -> tuple[Numbers, Numbers]:
    """Return sets of suspects that explain failures best, shape (sets, suspects), and the logs of their weights.

    ``failed`` masks the suspects of each failed launch, shape (launches, suspects); ``log_odds`` are their priors.
    """
    count = len(log_odds)
    keys = np.random.default_rng(0).integers(
        np.iinfo(np.int64).max, size=count
    )  # a set's key is the XOR of its members'
    unlike, log_chance = 1.0 - failed, float(np.log(_BY_CHANCE))
    sets, unexplained, key = (
        np.zeros((1, count), dtype=bool),
        np.ones((1, len(failed)), dtype=bool),
        np.zeros(1, np.int64),
    )
    result, weights = [sets], [np.full(1, len(failed) * log_chance)]
    for _ in range(min(count, _MOST_FAULTY)):
        left = unexplained @ unlike
        weight = np.where(sets, -np.inf, (sets @ log_odds)[:, None] + log_odds + left * log_chance).ravel()
        order = descending(weight)[: len(weight) - np.count_nonzero(sets)]
        grown, added = np.unravel_index(order, sets.shape)
        larger = key[grown] ^ keys[added]
        kept = np.sort(np.unique(larger, return_index=True)[1])[:_HYPOTHESES]
        grown, added, key = grown[kept], added[kept], larger[kept]
        sets = sets[grown]
        sets[np.arange(len(kept)), added] = True
        unexplained = unexplained[grown] & ~failed.T[added]
        result.append(sets)
        weights.append(weight[order[kept]])
    return np.concatenate(result), np.concatenate(weights)
