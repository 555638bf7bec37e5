"""Draw the structure (ZeRO stage and offload) of a new lineage in proportion to its expected gain.

Pure functions of the history and of a random generator.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import CategoricalDistribution
from optuna.study import StudyDirection

from optuna_dsat.trials.effects import Choices, Effects
from optuna_dsat.trials.lineage import STRUCTURE, ZERO_STAGE, Lineage, agrees, lineage_key
from optuna_dsat.trials.lineage_index import Lineages, StructureGroup, best_lineage, structure_edge

__all__ = ["DEAD_FACTOR", "HOPELESS_FACTOR", "dead", "draw_structure", "largest_fit"]

DEAD_FACTOR = 1 / 4
"""Factor per lineage that did not fit at the smallest micro-batch or failed at any, if its structure never fitted."""
HOPELESS_FACTOR = 1 / 50
"""Factor if all structures with this choice are hopeless."""
_NEW_PROBABILITY = 1 / 5
"""Probability that a new lineage has a new structure, while structures without lineages remain."""
_LEAST = 1e-6
"""Gain assigned to structures without an expected gain."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    params: Mapping[str, Any]
    """ZeRO stage and offloads."""
    is_new: bool
    """Whether it has no lineage yet, and may win."""
    gain: float
    """Expected gain times the odds that it runs."""


def draw_structure(
    rng: random.Random,
    context: Mapping[str, Any],
    lineages: Lineages,
    effects: Effects,
    *,
    hopeless: Sequence[Mapping[str, Any]] = (),
    direction: StudyDirection = StudyDirection.MAXIMIZE,
) -> Mapping[str, Any] | None:
    """Return the structure of a new lineage, None if no known structure has the knobs drawn before.

    Equal generators draw the same structure, regardless of the knobs drawn before.

    Args:
        rng: Random generator.
        context: Knobs of the structure that were drawn before.
        lineages: Lineages opened before.
        effects: Effects estimated from the lineages.
        hopeless: Structures (partial knobs) that fail or cannot win.
        direction: Direction of the metric.
    """
    seed = rng.getrandbits(63)
    candidates = lineages.derived(
        ("candidates", seed, frozenset(map(lineage_key, hopeless)), direction),
        lambda: _candidates(random.Random(seed), lineages, effects, hopeless, direction),
    )
    only_new, at = rng.random() < _NEW_PROBABILITY, rng.random()
    left = [candidate for candidate in candidates if agrees(candidate.params, context, strict=True)]
    for pool in (candidates, left):
        drawn = _pick(pool, only_new=only_new, at=at)
        if drawn is not None and drawn in left:
            return drawn.params
    return None


def _pick(pool: Sequence[_Candidate], *, only_new: bool, at: float) -> _Candidate | None:
    """Return the candidate at the share ``at`` of the cumulative gains, None without candidates."""
    pool = [item for item in pool if item.is_new] if only_new and any(item.is_new for item in pool) else pool
    target = at * sum(item.gain for item in pool)
    for candidate, reached in zip(pool, itertools.accumulate(item.gain for item in pool), strict=True):
        if reached >= target:
            return candidate
    return pool[-1] if pool else None


def _candidates(
    rng: random.Random,
    lineages: Lineages,
    effects: Effects,
    hopeless: Sequence[Mapping[str, Any]],
    direction: StudyDirection,
) -> Sequence[_Candidate]:
    """Return the structures with unopened lineages, and their expected gains."""
    candidates = []
    for params in _structures(lineages):
        if lineages.tree.closed(params):
            continue
        group = lineages.structure_group(params)
        group = group if group is not None and group.complete else None
        knobs = _knobs(group or _of_stage(lineages, params))
        sizes = {effects.best_size} if group is None else _sizes(group, lineages, effects.best_size, direction)
        gain = max(effects.expected_gain(rng, params, size, knobs) for size in sorted(sizes))
        odds = 1.0 if group is None or largest_fit(group) is not None else DEAD_FACTOR ** dead(group)
        is_hopeless = any(agrees(params, record, strict=True) for record in hopeless)
        odds *= HOPELESS_FACTOR if is_hopeless else 1.0
        is_new = group is None and not is_hopeless
        candidates.append(_Candidate(params=params, is_new=is_new, gain=odds * (gain + _LEAST)))
    return candidates


def _sizes(group: StructureGroup, lineages: Lineages, best_size: int, direction: StudyDirection) -> set[int]:
    """Return the micro-batches at which to judge a structure: its best, and the study's best as far as it fits."""
    members = group.members.values()
    fits = largest_fit(group) or 1
    top = max([fits, *(member.ceiling for member in members if member.ceiling is not None)])
    edge = structure_edge(next(iter(members)), lineages)
    limit = top if edge is None else min(top, edge - 1)
    sizes = {max(1, min(best_size, limit))}
    best = best_lineage(group, direction)
    trial = None if best is None else best.best(direction)
    if best is not None and trial is not None:
        sizes.add(best.size(trial))
    return sizes


def _structures(lineages: Lineages) -> Sequence[Mapping[str, Any]]:
    """Return all structures of the space, inferred from the choices of the lineages."""

    def find() -> Sequence[Mapping[str, Any]]:
        stages: dict[Any, None] = {}
        offloads: dict[Any, Choices] = {}
        for group in lineages.structures.values():
            lineage = _complete(group)
            if lineage is not None:
                shown = _choices(lineage)
                stages.update(dict.fromkeys(shown.get(ZERO_STAGE, ())))
                own = {name: shown[name] for name in STRUCTURE if name != ZERO_STAGE and name in shown}
                stage = lineage.params.get(ZERO_STAGE)
                offloads[stage] = max(own, offloads.get(stage, {}), key=len)
        return [
            {ZERO_STAGE: stage, **dict(zip(offloads.get(stage, {}), targets, strict=True))}
            for stage in stages
            for targets in itertools.product(*offloads.get(stage, {}).values())
        ]

    return lineages.derived("structures of the space", find)


def _of_stage(lineages: Lineages, params: Mapping[str, Any]) -> StructureGroup | None:
    """Return the first structure with a complete lineage of the same ZeRO stage, else None."""
    stage = {ZERO_STAGE: params[ZERO_STAGE]}
    groups = (group for group in lineages.structures.values() if group.complete)
    return next((group for group in groups if agrees(group.params, stage, strict=True)), None)


def _knobs(group: StructureGroup | None) -> Choices:
    """Return the choices of the knobs that are not part of the structure; empty if they are unknown."""
    lineage = None if group is None else _complete(group)
    shown = {} if lineage is None else _choices(lineage)
    return {name: choices for name, choices in shown.items() if name not in STRUCTURE}


def _complete(group: StructureGroup) -> Lineage | None:
    result = (member for member in group.members.values() if member.complete)
    return group.derived("first complete", lambda: next(result, None))


def _choices(lineage: Lineage) -> Choices:
    distributions = lineage.trials[-1].distributions
    return {
        name: distribution.choices
        for name in lineage.params
        if isinstance(distribution := distributions.get(name), CategoricalDistribution)
    }


def largest_fit(group: StructureGroup) -> int | None:
    """Return the largest micro-batch that fitted a lineage of a group, else None."""
    return group.derived(
        "largest fit",
        lambda: max((o.largest_fit for o in group.members.values() if o.largest_fit is not None), default=None),
    )


def dead(group: StructureGroup) -> int:
    """Return the number of lineages of a group that did not fit at the smallest micro-batch, or failed at any."""
    return group.derived("dead", lambda: sum(o.dead or o.broken for o in group.members.values()))
