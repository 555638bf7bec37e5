"""Rungs of asynchronous successive halving over lineages: pure functions.

Li et al. 2018, "A System for Massively Parallel Hyperparameter Tuning" (arXiv:1810.05934), algorithm 2, with
the launches of a lineage as the resource. Rung k has ``r * eta ** (s + k)`` launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optuna.study import StudyDirection

from optuna_dsat.trials.lineage import Lineage

__all__ = ["Rung", "Rungs", "build_rungs", "survivors"]


@dataclass(frozen=True, kw_only=True)
class Rungs:
    """Sizes of the rungs, in launches."""

    max_rungs: int
    """Number of rungs; the last rung is never left."""
    min_launches: int
    """Launches of the lowest rung, before ``early_stopping`` (``r`` in the paper)."""
    divisor: int
    """Inverse share of lineages promoted to the next rung (``eta`` in the paper)."""
    early_stopping: int
    """Raises all rungs by this power of the divisor (``s`` in the paper)."""

    def size(self, rung: int) -> int:
        """Return the total launches of a lineage that completed a rung."""
        return self.min_launches * int(self.divisor ** (self.early_stopping + rung))


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Completed and promoted lineages of a rung."""

    completed: tuple[str, ...]
    """Keys of the lineages that completed it, best first."""
    promoted: frozenset[str]
    """Keys of the promoted lineages: the best ``1 / divisor``, and lineages overtaken after their promotion."""


def build_rungs(
    lineages: Mapping[str, Lineage],
    *,
    rungs: Rungs,
    direction: StudyDirection,
    ended: frozenset[str] = frozenset(),
) -> list[Rung]:
    """Return the rungs, from the lowest.

    A lineage completes a rung when it has the launches of the rung, or when its search ended with fewer. It is
    ranked by its best metric within the launches of the rung, so a longer search is not an advantage. A lineage
    without a metric counts as completed but is never promoted.
    """
    remaining = list(lineages)
    result = []
    for index in range(rungs.max_rungs):
        size = rungs.size(index)
        completed = [key for key in remaining if len(lineages[key].conclusive) >= size or key in ended]
        scores = {key: lineages[key].best_score(direction, first=size) for key in completed}
        ranked = survivors(scores, keep=len(completed), direction=direction)
        top = survivors(scores, keep=len(completed) // rungs.divisor, direction=direction)
        already_promoted = [key for key in completed if len(lineages[key].conclusive) > size]
        promoted = frozenset([*top, *already_promoted]) if index < rungs.max_rungs - 1 else frozenset[str]()
        unranked = [key for key in completed if scores[key] is None]
        result.append(Rung(completed=(*ranked, *unranked), promoted=promoted))
        remaining = [key for key in remaining if key in promoted]
    return result


def survivors(scores: Mapping[str, float | None], *, keep: int, direction: StudyDirection) -> list[str]:
    """Return the keys of the ``keep`` best scores, best first; ties keep their order."""
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    scored = [(sign * score, key) for key, score in scores.items() if score is not None]
    return [key for _, key in sorted(scored, key=lambda item: item[0])][:keep]
