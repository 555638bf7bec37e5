"""Random draws that depend on their seed only, and the choices of a new lineage without a planner."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from optuna_dsat.trials.history import all_opened
from optuna_dsat.trials.lineage import Lineage

__all__ = ["draw", "draw_choice", "generator"]


def generator(*parts: object) -> random.Random:
    """Return a random generator seeded by the parts only, reproducible on every machine."""
    digest = hashlib.sha256("\x1f".join(map(repr, parts)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def draw(rng: random.Random, distribution: BaseDistribution) -> Any:
    """Return a value drawn uniformly, on a logarithmic scale if the distribution is logarithmic."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[rng.randrange(len(distribution.choices))]
    if isinstance(distribution, IntDistribution):
        return _draw_int(rng, distribution)
    if isinstance(distribution, FloatDistribution):
        return _draw_float(rng, distribution)
    raise ValueError(f"a distribution must be categorical, int or float, not {distribution!r}")


def draw_choice(
    rng: random.Random,
    name: str,
    distribution: CategoricalDistribution,
    *,
    params: Mapping[str, Any],
    lineages: Iterable[Lineage],
    hopeless: Sequence[Mapping[str, Any]],
) -> Any:
    """Return a random choice of a knob whose lineages were not all opened before.

    Structures that are hopeless are drawn only if no other is left.

    ``hopeless`` contains structures (partial knobs) that fail or cannot win.
    """
    known, choices = list(lineages), distribution.choices
    for avoided in (hopeless, ()):
        left = [choice for choice in choices if not all_opened({**params, name: choice}, known, avoided)]
        if left:
            return rng.choice(left)
    return rng.choice(choices)


def _draw_int(rng: random.Random, distribution: IntDistribution) -> int:
    low, high, step = distribution.low, distribution.high, distribution.step
    if distribution.log:
        value = math.exp(rng.uniform(math.log(low - 0.5), math.log(high + 0.5)))
        return min(max(round(value), low), high)
    return rng.randrange(low, high + 1, step)


def _draw_float(rng: random.Random, distribution: FloatDistribution) -> float:
    low, high, step = distribution.low, distribution.high, distribution.step
    if distribution.log:
        return min(max(math.exp(rng.uniform(math.log(low), math.log(high))), low), high)
    if step is not None:
        steps = math.floor((high - low) / step + 1e-9)
        return min(low + rng.randint(0, steps) * step, high)
    return rng.uniform(low, high)
