"""Rungs of asynchronous successive halving over lineages: pure functions.

Li et al. 2018, "A System for Massively Parallel Hyperparameter Tuning" (arXiv:1810.05934), algorithm 2, with
the launches given to a lineage as the resource. Rung k holds ``r * eta ** (s + k)`` launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optuna.study import StudyDirection

from optuna_dsat.trials.lineage import Lineage

__all__ = ["Rung", "Rungs", "build_rungs", "survivors"]


@dataclass(frozen=True, kw_only=True)
class Rungs:
    """How many launches each rung holds."""

    max_rungs: int
    """Number of rungs; the last one is never left."""
    min_launches: int
    """Launches of the lowest rung, before ``early_stopping`` (``r`` in the paper)."""
    divisor: int
    """One lineage in ``divisor`` goes on to the next rung (``eta`` in the paper)."""
    early_stopping: int
    """Raises all rungs by this power of the divisor (``s`` in the paper)."""

    def size(self, rung: int) -> int:
        """Return the launches a lineage has in total when it completes a rung."""
        return self.min_launches * int(self.divisor ** (self.early_stopping + rung))


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One rung: who completed it, and who of those goes on."""

    completed: tuple[str, ...]
    """Keys of the lineages that completed it, the best first."""
    promoted: frozenset[str]
    """Those that may go on: the best ``1 / divisor``, and those that went on before others overtook them."""


def build_rungs(
    lineages: Mapping[str, Lineage],
    *,
    rungs: Rungs,
    direction: StudyDirection,
    ended: frozenset[str] = frozenset(),
) -> list[Rung]:
    """Return the rungs, from the lowest.

    A lineage completes a rung when it has as many launches as the rung holds, or when its search ended with
    fewer. It is ranked by its best metric within the launches of the rung, so a longer search is no
    advantage. A lineage without a metric counts as completed but never goes on.

    Args:
        lineages: The lineages of the study.
        rungs: Sizes.
        direction: What is better.
        ended: Keys of lineages whose search is over.
    """
    climbing = list(lineages)
    found = []
    for index in range(rungs.max_rungs):
        size = rungs.size(index)
        completed = [key for key in climbing if len(lineages[key].conclusive) >= size or key in ended]
        scores = {key: lineages[key].best_score(direction, first=size) for key in completed}
        ranked = survivors(scores, keep=len(completed), direction=direction)
        top = survivors(scores, keep=len(completed) // rungs.divisor, direction=direction)
        gone_on = [key for key in completed if len(lineages[key].conclusive) > size]
        promoted = frozenset([*top, *gone_on]) if index < rungs.max_rungs - 1 else frozenset[str]()
        unranked = [key for key in completed if scores[key] is None]
        found.append(Rung(completed=(*ranked, *unranked), promoted=promoted))
        climbing = [key for key in climbing if key in promoted]
    return found


def survivors(scores: Mapping[str, float | None], *, keep: int, direction: StudyDirection) -> list[str]:
    """Return the keys of the ``keep`` best scores, the best first, earlier keys first among equals."""
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    scored = [(sign * score, key) for key, score in scores.items() if score is not None]
    return [key for _, key in sorted(scored, key=lambda item: item[0])][:keep]
