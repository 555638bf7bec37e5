"""Drawing the knobs of a new lineage: balanced over those opened before, weighed by what is known to fit.

Pure functions of the history and of a random generator. Four rules, in this order:

1. A choice whose every completion was opened before is not drawn: no lineage is opened twice.
2. The first lineage of a structure (ZeRO stage and offload) has the usual values of all other knobs, where they are
   known: the user's, or DeepSpeed's defaults. In later ones each of these knobs is taken over from the best lineage
   of the structure with probability 3/4 (uniform crossover with a new draw; Syswerda 1989), so that what did well is
   varied rather than forgotten.
3. Choices are drawn in turn rather than by pure chance: of weights ``w`` and counts ``n`` of lineages opened
   so far, one of the choices with the largest ``w / (2 n + 1)`` is taken (the highest averages of
   Sainte-Laguë), ties at random. With equal weights this is one coordinate of a Latin hypercube (McKay et al.
   1979): every choice comes once before any comes again, so few lineages cover all choices.
4. All weights are equal but those of ``zero_stage`` and the offload knobs, which decide what fits and what is
   communicated: see ``_structural_weight`` and ``_merit``.
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
"""Bounds of the weight of offloading where a lineage fits without: 1 / (largest micro-batch that fits)."""
_UNKNOWN_WEIGHT = 1 / 8
"""Weight of offloading before it is known what fits without."""
_DEAD_FACTOR = 1 / 4
"""Per lineage that did not fit at the smallest micro-batch, where none of its kind fits."""
_HOPELESS_FACTOR = 1 / 50
_JUDGED_ANSWERS = 3
"""Launches after which the lineages of a structure speak for it."""
_MERIT_POWER = 12
"""A structure at 95 % of the best is drawn about half as often, one at 80 % of it 0.07 times."""
_LEAST_RATIO = 0.65
_INHERITED = 3 / 4
"""Probability that a knob is taken over from the best lineage of its structure."""

Usual = Callable[[str, Mapping[str, Any]], Any]
"""The value a knob has where nobody tunes it: (name, knobs drawn before) -> value."""


def generator(*parts: object) -> random.Random:
    """Return a random generator that depends on the parts alone, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(map(repr, parts)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def draw(rng: random.Random, distribution: BaseDistribution) -> Any:
    """Return a value drawn uniformly, on the logarithmic scale where the distribution is."""
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
        opening: Knobs drawn so far of lineages that others are opening now.
        hopeless: Structures (partial knobs) of which no lineage can win, by the study's pruner.
        direction: What is better.
        usual: The values the first lineage of a structure takes; None to draw them like all others.
    """
    context = structure(params)
    kinds = [kind for kind in lineages.structures.values() if kind.complete]
    if name not in STRUCTURE:
        kept = _kept(rng, name, params, context, lineages, opening, direction, usual)
        if kept in distribution.choices and not lineages.tree.closed({**params, name: kept}):
            return kept
    beside = [kind for kind in kinds if agrees(kind.params, context)]
    begun = [p for p in opening if agrees(p, context)]
    merits = []
    for choice in distribution.choices:
        weight = 0.0 if lineages.tree.closed({**params, name: choice}) else 1.0
        if weight and name in STRUCTURE:
            weight *= _structural_weight(name, choice, context, kinds, hopeless)
            weight *= _merit({**context, name: choice}, kinds, direction)
        count = sum(name in p and agrees(p, {name: choice}) for p in begun)
        count += sum(kind.count(name, choice) for kind in beside)
        merits.append(weight / (2 * count + 1))
    best = max(merits)
    return rng.choice([c for c, merit in zip(distribution.choices, merits, strict=True) if merit == best])


def _structural_weight(
    name: str,
    choice: Any,
    context: Mapping[str, Any],
    kinds: Sequence[StructureGroup],
    hopeless: Sequence[Mapping[str, Any]],
) -> float:
    """Return the weight of a ZeRO stage or of an offload choice, from what is known to fit.

    Offloading starts rare and becomes the rule where nothing fits without it. A choice loses weight with each
    lineage that did not fit at the smallest micro-batch, and nearly all where the pruner calls all its kinds
    hopeless.
    """
    alike = [kind for kind in kinds if agrees(kind.params, {**context, name: choice}, strict=True)]
    weight = 1.0
    if name in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM) and choice not in _NO_OFFLOAD:
        weight = _offload_weight(name, context, kinds)
    if not any(_largest_fit(kind) is not None for kind in alike):
        weight *= _DEAD_FACTOR ** sum(_dead(kind) for kind in alike)
    if alike and all(kind.params in hopeless for kind in alike):
        weight *= _HOPELESS_FACTOR
    return weight


def _merit(params: Mapping[str, Any], kinds: Sequence[StructureGroup], direction: StudyDirection) -> float:
    """Return how good the best lineage of a structure is, relative to the best of all: a power of the ratio.

    Only structures with some launches count, so that none is judged by its first micro-batch; without them, or with
    metrics that are not positive, the merit is 1.
    """
    every = [best for kind in kinds if (best := _judged(kind, direction)) is not None]
    scores = [
        best
        for kind in kinds
        if agrees(kind.params, params, strict=True) and (best := _judged(kind, direction)) is not None
    ]
    if not scores or min(every) <= 0 or max(every) == math.inf:
        return 1.0
    maximize = direction == StudyDirection.MAXIMIZE
    ratio = max(scores) / max(every) if maximize else min(every) / min(scores)
    return float(max(ratio, _LEAST_RATIO) ** _MERIT_POWER)


def _judged(kind: StructureGroup, direction: StudyDirection) -> float | None:
    """Return the best metric of a kind that had enough launches to speak for itself, None for others."""

    def find() -> float | None:
        launches = sum(len(lineage.conclusive) for lineage in kind.members.values())
        return best_structure_score(kind, direction) if launches >= _JUDGED_ANSWERS else None

    return kind.derived(("judged", direction), find)


def _kept(
    rng: random.Random,
    name: str,
    params: Mapping[str, Any],
    context: Mapping[str, Any],
    lineages: Lineages,
    opening: Sequence[Mapping[str, Any]],
    direction: StudyDirection,
    usual: Usual | None,
) -> Any:
    """Return the value that a knob takes without being drawn (see the module's second rule), None for none."""
    kind = lineages.structure_group(context)
    if kind is None or not kind.complete:
        if usual is None or any(agrees(p, context, strict=True) for p in opening):
            return None
        return usual(name, params)
    best = best_lineage(kind, direction)
    if best is None or rng.random() >= _INHERITED:
        return None
    return best.params.get(name)


def _largest_fit(kind: StructureGroup) -> int | None:
    """Return the largest micro-batch that fitted a lineage of a kind."""
    return kind.derived(
        "largest fit",
        lambda: max((o.largest_fit for o in kind.members.values() if o.largest_fit is not None), default=None),
    )


def _dead(kind: StructureGroup) -> int:
    """Return how many lineages of a kind did not fit at the smallest micro-batch."""
    return kind.derived("dead", lambda: sum(o.dead for o in kind.members.values()))


def _offload_weight(name: str, context: Mapping[str, Any], kinds: Sequence[StructureGroup]) -> float:
    """Return the weight of offloading: it trades time for memory, which pays where little fits without."""
    without = [k for k in kinds if agrees(k.params, context, strict=True) and k.params.get(name) in _NO_OFFLOAD]
    fits = max((fit for kind in without if (fit := _largest_fit(kind)) is not None), default=None)
    if fits is not None:
        rare, common = _OFFLOAD_WEIGHTS
        return min(max(1 / fits, rare), common)
    return 1.0 if any(_dead(kind) for kind in without) else _UNKNOWN_WEIGHT


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
