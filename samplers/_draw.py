"""Draws the knobs of a new lineage: balanced over those opened before, weighted by what is known to fit.

Pure functions of the history and of a random generator. Four rules, in this order:

1. A choice all of whose completions were opened before is not drawn: no lineage is opened twice.
2. The first lineage of a structure (ZeRO stage and offload) has the usual values of all other knobs, if they are known:
   the user's, or DeepSpeed's defaults. In later ones each of these knobs is taken over from the best lineage of the
   structure with probability 3/4 (uniform crossover with a new draw; Syswerda 1989), so that good configurations are
   varied rather than forgotten.
3. Choices are balanced rather than independent: with weights ``w`` and counts ``n`` of lineages opened so far, one of
   the choices with the largest ``w / (2 n + 1)`` is taken (the highest averages of Sainte-Laguë), ties at random. With
   equal weights this is one coordinate of a Latin hypercube (McKay et al. 1979): every choice comes once before any
   comes again, so few lineages cover all choices.
4. All weights are equal except those of ``zero_stage`` and the offload knobs, which decide what fits and what is
   communicated: see ``_structural_weight`` and ``_structure_merit``.
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
from optuna_dsat.trials.lineage_index import Lineages, StructureGroup, best_lineage, best_structure_score

__all__ = ["Usual", "draw", "draw_choice", "generator"]

_NO_OFFLOAD = ("none", None, False)
_OFFLOAD_WEIGHTS = (1 / 16, 1 / 2)
"""Bounds of the weight of offloading if a lineage fits without: 1 / (largest micro-batch that fits)."""
_UNKNOWN_WEIGHT = 1 / 8
"""Weight of offloading while it is unknown what fits without."""
_DEAD_FACTOR = 1 / 4
"""Factor per lineage that did not fit at the smallest micro-batch, if none of its structure fits."""
_HOPELESS_FACTOR = 1 / 50
"""Factor if the pruner calls all structures with this choice hopeless."""
_MIN_JUDGED_LAUNCHES = 3
"""Conclusive launches of a structure from which its best metric counts."""
_MERIT_POWER = 12
"""A structure at 95 % of the best is drawn about half as often, one at 80 % of it 0.07 times."""
_LEAST_RATIO = 0.65
"""Lower bound of that ratio."""
_INHERITANCE_PROBABILITY = 3 / 4
"""Probability that a knob is taken over from the best lineage of its structure."""

Usual = Callable[[str, Mapping[str, Any]], Any]
"""Value of a knob that is not tuned: (name, knobs drawn before) -> value."""


def generator(*parts: object) -> random.Random:
    """Return a random generator seeded by the parts only, equal on every machine."""
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
    lineages: Lineages,
    opening: Sequence[Mapping[str, Any]] = (),
    hopeless: Sequence[Mapping[str, Any]] = (),
    direction: StudyDirection = StudyDirection.MAXIMIZE,
    usual: Usual | None = None,
) -> Any:
    """Return the choice of one knob of a new lineage.

    Args:
        rng: Breaks ties.
        name: The knob.
        distribution: Its choices.
        params: The knobs drawn before.
        lineages: Lineages opened before.
        opening: Knobs drawn so far of lineages that other workers are opening.
        hopeless: Structures (partial knobs) of which no lineage can win according to the study's pruner.
        direction: Direction of the metric.
        usual: Values of the first lineage of each structure; None to draw them like all others.
    """
    context = structure(params)
    groups = [group for group in lineages.structures.values() if group.complete]
    if name not in STRUCTURE:
        kept = _inherited(rng, name, params, context, lineages, opening, direction, usual)
        if kept in distribution.choices and not lineages.tree.closed({**params, name: kept}):
            return kept
    same_context = [group for group in groups if agrees(group.params, context)]
    being_opened = [p for p in opening if agrees(p, context)]
    priorities = []
    for choice in distribution.choices:
        weight = 0.0 if lineages.tree.closed({**params, name: choice}) else 1.0
        if weight and name in STRUCTURE:
            weight *= _structural_weight(name, choice, context, groups, hopeless)
            weight *= _structure_merit({**context, name: choice}, groups, direction)
        count = sum(name in p and agrees(p, {name: choice}) for p in being_opened)
        count += sum(group.count(name, choice) for group in same_context)
        priorities.append(weight / (2 * count + 1))
    best = max(priorities)
    return rng.choice([c for c, priority in zip(distribution.choices, priorities, strict=True) if priority == best])


def _structural_weight(
    name: str,
    choice: Any,
    context: Mapping[str, Any],
    groups: Sequence[StructureGroup],
    hopeless: Sequence[Mapping[str, Any]],
) -> float:
    """Return the weight of a ZeRO stage or of an offload choice, given what is known to fit.

    Offloading starts rare and becomes the rule if nothing fits without it. A choice loses weight with each lineage
    that did not fit at the smallest micro-batch, and nearly all weight if the pruner calls all its structures
    hopeless.
    """
    matching = [group for group in groups if agrees(group.params, {**context, name: choice}, strict=True)]
    weight = 1.0
    if name in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM) and choice not in _NO_OFFLOAD:
        weight = _offload_weight(name, context, groups)
    if not any(_largest_fit(group) is not None for group in matching):
        weight *= _DEAD_FACTOR ** sum(_dead(group) for group in matching)
    if matching and all(group.params in hopeless for group in matching):
        weight *= _HOPELESS_FACTOR
    return weight


def _structure_merit(params: Mapping[str, Any], groups: Sequence[StructureGroup], direction: StudyDirection) -> float:
    """Return the metric of a structure's best lineage relative to the best of all, raised to a power.

    Only structures with some conclusive launches count, so that none is judged by its first micro-batch. Without any,
    or with metrics that are not positive, the result is 1.
    """
    all_scores = [best for group in groups if (best := _judged_score(group, direction)) is not None]
    scores = [
        best
        for group in groups
        if agrees(group.params, params, strict=True) and (best := _judged_score(group, direction)) is not None
    ]
    if not scores or min(all_scores) <= 0 or max(all_scores) == math.inf:
        return 1.0
    maximize = direction == StudyDirection.MAXIMIZE
    ratio = max(scores) / max(all_scores) if maximize else min(all_scores) / min(scores)
    return float(max(ratio, _LEAST_RATIO) ** _MERIT_POWER)


def _judged_score(group: StructureGroup, direction: StudyDirection) -> float | None:
    """Return the best metric of a group with enough conclusive launches, None for others."""

    def find() -> float | None:
        launches = sum(len(lineage.conclusive) for lineage in group.members.values())
        return best_structure_score(group, direction) if launches >= _MIN_JUDGED_LAUNCHES else None

    return group.derived(("judged", direction), find)


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
    """Return the value that a knob takes without being drawn (rule 2 of the module), None if it is drawn."""
    group = lineages.structure_group(context)
    if group is None or not group.complete:
        if usual is None or any(agrees(p, context, strict=True) for p in opening):
            return None
        return usual(name, params)
    best = best_lineage(group, direction)
    if best is None or rng.random() >= _INHERITANCE_PROBABILITY:
        return None
    return best.params.get(name)


def _largest_fit(group: StructureGroup) -> int | None:
    """Return the largest micro-batch that fitted a lineage of a group, None if none did."""
    return group.derived(
        "largest fit",
        lambda: max((o.largest_fit for o in group.members.values() if o.largest_fit is not None), default=None),
    )


def _dead(group: StructureGroup) -> int:
    """Return the number of lineages of a group that did not fit at the smallest micro-batch."""
    return group.derived("dead", lambda: sum(o.dead for o in group.members.values()))


def _offload_weight(name: str, context: Mapping[str, Any], groups: Sequence[StructureGroup]) -> float:
    """Return the weight of offloading, which trades time for memory and pays if little fits without it."""
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
