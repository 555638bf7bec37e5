"""Draw the knobs of a new lineage without a planner, balanced over the lineages opened before.

Pure functions of the history and of a random generator. Three rules, in this order:

1. A choice whose completions were all opened before is not drawn: no lineage is opened twice.
2. The first lineage of a structure (ZeRO stage and offload) has the usual values of all other knobs, if they are known.
   In later lineages, each of these knobs is inherited from the best lineage of the structure with probability 1/2
   (uniform crossover with a new draw; Syswerda 1989), so that good configurations are varied rather than forgotten.
3. Otherwise choices are balanced rather than independent: with weights ``w`` and counts ``n`` of lineages opened so
   far, the choice with the largest ``w / (2 n + 1)`` is taken (highest averages of Sainte-Laguë), with random ties.
   With equal weights this is a coordinate of a Latin hypercube (McKay et al. 1979): every choice is drawn once before
   any is repeated. Weights are equal except for ``zero_stage`` and the offload knobs, which determine memory use: see
   ``_structural_weight``.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import StudyDirection

from optuna_dsat.trials.lineage import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, STRUCTURE, agrees, structure
from optuna_dsat.trials.lineage_index import Lineages, StructureGroup, best_lineage

__all__ = ["Usual", "draw", "draw_choice", "generator"]

_NO_OFFLOAD = ("none", None, False)
_OFFLOAD_WEIGHTS = (1 / 16, 1 / 2)
"""Bounds of the weight of offloading if a lineage fits without offload: 1 / (largest micro-batch that fits)."""
_UNKNOWN_WEIGHT = 1 / 8
"""Weight of offloading while nothing was measured without offload."""
_DEAD_FACTOR = 1 / 4
"""Factor per lineage that did not fit at the smallest micro-batch or failed at any, if its structure never fitted."""
_HOPELESS_FACTOR = 1 / 50
"""Factor if all structures with this choice are hopeless."""
_INHERITANCE_PROBABILITY = 1 / 2
"""Probability that a knob is inherited from the best lineage of its structure."""

Usual = Callable[[str, Mapping[str, Any]], Any]
"""Value of a knob that is not tuned: (name, knobs drawn before) -> value."""


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
    generate: Callable[[str], random.Random],
    name: str,
    distribution: CategoricalDistribution,
    *,
    params: Mapping[str, Any],
    lineages: Lineages,
    opening: Sequence[Mapping[str, Any]] = (),
    hopeless: Sequence[Mapping[str, Any]] = (),
    direction: StudyDirection = StudyDirection.MAXIMIZE,
    usual: Usual | None = None,
) -> Any:
    """Return the choice of a knob of a new lineage.

    Args:
        generate: Name of a draw -> generator; the same for all knobs of a new lineage.
        name: The knob.
        distribution: Choices of the knob.
        params: The knobs drawn before.
        lineages: Lineages opened before.
        opening: Knobs drawn so far of lineages that other workers are opening.
        hopeless: Structures (partial knobs) that fail or cannot win.
        direction: Direction of the metric.
        usual: Values of the first lineage of each structure; None to draw them as in other lineages.
    """
    context, choices = structure(params), distribution.choices
    left = [choice for choice in choices if not lineages.tree.closed({**params, name: choice})]
    rng = generate(name)
    if name not in STRUCTURE:
        kept = _inherited(rng, name, params, context, lineages, opening, direction, usual)
        if kept in left:
            return kept
    return _balanced(rng, name, choices, left, context=context, lineages=lineages, opening=opening, hopeless=hopeless)


def _balanced(
    rng: random.Random,
    name: str,
    choices: Sequence[Any],
    left: Sequence[Any],
    *,
    context: Mapping[str, Any],
    lineages: Lineages,
    opening: Sequence[Mapping[str, Any]],
    hopeless: Sequence[Mapping[str, Any]],
) -> Any:
    """Return the choice with the highest average (rule 3 of the module), or any choice if all were opened."""
    groups = [group for group in lineages.structures.values() if group.complete]
    same_context = [group for group in groups if agrees(group.params, context)]
    being_opened = [p for p in opening if agrees(p, context)]
    priorities = []
    for choice in choices:
        weight = 1.0 if choice in left else 0.0
        if weight and name in STRUCTURE:
            weight *= _structural_weight(name, choice, context, groups, hopeless)
        count = sum(name in p and agrees(p, {name: choice}) for p in being_opened)
        count += sum(group.count(name, choice) for group in same_context)
        priorities.append(weight / (2 * count + 1))
    best = max(priorities)
    return rng.choice([c for c, priority in zip(choices, priorities, strict=True) if priority == best])


def _structural_weight(
    name: str,
    choice: Any,
    context: Mapping[str, Any],
    groups: Sequence[StructureGroup],
    hopeless: Sequence[Mapping[str, Any]],
) -> float:
    """Return the weight of a ZeRO stage or of an offload choice, given the micro-batches that fitted.

    Offloading is rare at first and frequent if nothing fits without it. A choice loses weight with each lineage that
    did not fit at the smallest micro-batch, and nearly all weight if all its structures are hopeless.
    """
    matching = [group for group in groups if agrees(group.params, {**context, name: choice}, strict=True)]
    weight = 1.0
    if name in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM) and choice not in _NO_OFFLOAD:
        weight = _offload_weight(name, context, groups)
    if not any(_largest_fit(group) is not None for group in matching):
        weight *= _DEAD_FACTOR ** sum(_dead(group) for group in matching)
    known = [group.params for group in matching] or [{**context, name: choice}]
    if all(any(agrees(params, record, strict=True) for record in hopeless) for params in known):
        weight *= _HOPELESS_FACTOR
    return weight


def _inherited(
    rng: random.Random,
    name: str,
    params: Mapping[str, Any],
    context: Mapping[str, Any],
    lineages: Lineages,
    opening: Sequence[Mapping[str, Any]],
    direction: StudyDirection,
    usual: Usual | None,
) -> Any:
    """Return the usual or inherited value of a knob (rule 2 of the module), None if it is to be drawn."""
    group = lineages.structure_group(context)
    if group is None or not group.complete:
        if usual is None or any(agrees(p, context, strict=True) for p in opening):
            return None
        return usual(name, params)
    best = best_lineage(group, direction)
    if best is None or rng.random() >= _INHERITANCE_PROBABILITY:
        return None
    return best.params.get(name)


def _offload_weight(name: str, context: Mapping[str, Any], groups: Sequence[StructureGroup]) -> float:
    """Return the weight of offloading, which trades time for memory and is useful if little fits without it."""
    without = [k for k in groups if agrees(k.params, context, strict=True) and k.params.get(name) in _NO_OFFLOAD]
    fits = max((fit for group in without if (fit := _largest_fit(group)) is not None), default=None)
    if fits is not None:
        rare, common = _OFFLOAD_WEIGHTS
        return min(max(1 / fits, rare), common)
    return 1.0 if any(_dead(group) for group in without) else _UNKNOWN_WEIGHT


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


def _largest_fit(group: StructureGroup) -> int | None:
    """Return the largest micro-batch that fitted a lineage of a group, else None."""
    return group.derived(
        "largest fit",
        lambda: max((o.largest_fit for o in group.members.values() if o.largest_fit is not None), default=None),
    )


def _dead(group: StructureGroup) -> int:
    """Return the number of lineages of a group that did not fit at the smallest micro-batch, or failed at any."""
    return group.derived("dead", lambda: sum(o.dead or o.broken for o in group.members.values()))
