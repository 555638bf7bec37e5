"""All lineages of a study as one mapping that is cheap to keep up to date, and answers questions over all of them.

Samplers and pruners take any mapping of lineages. Given a plain one, they make a ``Lineages`` of it; given one that
was kept since the last decision, they repeat no work that the new trials leave as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from optuna.study import StudyDirection

from optuna_dsat.trials.lineage import Lineage, lineage_key, structure
from optuna_dsat.trials.lineage_tree import Choice, Tree, choice_of

__all__ = ["Lineages", "StructureGroup", "best_lineage", "best_score", "best_structure_score", "structure_edge"]

T = TypeVar("T")


class _Derived:
    """Remembers what was derived from an object until it changes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def derived(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what ``compute`` derives from this object alone; computed once for each ``key`` and change."""
        if key not in self._known:
            self._known[key] = compute()
        found: T = self._known[key]
        return found

    def _changed(self) -> None:
        self._known.clear()


class StructureGroup(_Derived):
    """The lineages of one structure (ZeRO stage and offload)."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.params = params
        """The structure."""
        self.members: dict[str, Lineage] = {}
        """By key, in no particular order."""
        self.complete = 0
        """Lineages of which a trial has suggested all parameters."""
        self._choices: Counter[Choice] = Counter()

    def count(self, name: str, value: Any) -> int:
        """Return how many complete lineages have this value of a knob."""
        return self._choices[choice_of(name, value)]

    def put(self, lineage: Lineage) -> None:
        """Add a lineage, or replace the one of its key."""
        self.drop(lineage.key)
        self.members[lineage.key] = lineage
        self._count(lineage, 1)

    def drop(self, key: str) -> None:
        """Take a lineage out, if it is here."""
        self._changed()
        lineage = self.members.pop(key, None)
        if lineage is not None:
            self._count(lineage, -1)

    def _count(self, lineage: Lineage, by: int) -> None:
        if lineage.complete:
            self.complete += by
            for knob in lineage.params.items():
                self._choices[choice_of(*knob)] += by


class Lineages(_Derived, Mapping[str, Lineage]):
    """Lineages by key, ordered by their first trial.

    Args:
        lineages: To begin with.
    """

    def __init__(self, lineages: Iterable[Lineage] = ()) -> None:
        super().__init__()
        self._all: dict[str, Lineage] = {}
        self._ordered = True
        self._structures: dict[str, StructureGroup] = {}
        self._tree = Tree(self._all)
        for lineage in lineages:
            self.put(lineage)

    @classmethod
    def of(cls, lineages: Mapping[str, Lineage]) -> Lineages:
        """Return the mapping itself where it is one of these, else one made of it."""
        return lineages if isinstance(lineages, Lineages) else cls(lineages.values())

    def __getitem__(self, key: str) -> Lineage:
        return self._all[key]

    def __contains__(self, key: object) -> bool:
        return key in self._all

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[str]:
        return iter(self.in_order())

    def in_order(self) -> Mapping[str, Lineage]:
        """Return the lineages as a dictionary, ordered by their first trial."""
        if not self._ordered:
            ordered = sorted(self._all.values(), key=lambda lineage: lineage.first_number)
            self._all.clear()
            self._all.update((lineage.key, lineage) for lineage in ordered)
            self._ordered = True
        return self._all

    @property
    def structures(self) -> Mapping[str, StructureGroup]:
        """The structures that lineages have, by their keys."""
        return MappingProxyType(self._structures)

    def structure_group(self, params: Mapping[str, Any]) -> StructureGroup | None:
        """Return the structure of some knobs, None where no lineage has it."""
        return self._structures.get(lineage_key(structure(params)))

    @property
    def tree(self) -> Tree:
        """The space, as far as complete lineages show it."""
        return self._tree

    def put(self, lineage: Lineage) -> None:
        """Add a lineage, or replace the one of its key, which has the same knobs."""
        self._changed()
        old = self._all.get(lineage.key)
        if old is None:
            last = next(reversed(self._all.values()), None)
            self._ordered &= last is None or last.first_number < lineage.first_number
        else:
            self._ordered &= old.first_number == lineage.first_number
        self._all[lineage.key] = lineage
        self._structures.setdefault(lineage.structure_key, StructureGroup(lineage.structure)).put(lineage)
        if old is not None and old.complete and lineage.complete and old.first_number == lineage.first_number:
            self._tree.touch(lineage)
            return
        if old is not None and old.complete:
            self._tree.drop(old)
        if lineage.complete:
            self._tree.add(lineage)

    def drop(self, key: str) -> None:
        """Take a lineage out."""
        self._changed()
        lineage = self._all[key]
        if lineage.complete:
            self._tree.drop(lineage)
        del self._all[key]
        kind = self._structures[lineage.structure_key]
        kind.drop(key)
        if not kind.members:
            del self._structures[lineage.structure_key]


def best_score(lineages: Lineages, direction: StudyDirection) -> float | None:
    """Return the best metric that any lineage showed, None where none did."""
    shown = [s for kind in lineages.structures.values() if (s := best_structure_score(kind, direction)) is not None]
    return _best(shown, direction)


def best_structure_score(kind: StructureGroup, direction: StudyDirection) -> float | None:
    """Return the best metric that a lineage of a structure showed, None where none did."""

    def find() -> float | None:
        return _best([s for o in kind.members.values() if (s := o.best_score(direction)) is not None], direction)

    return kind.derived(("best score", direction), find)


def best_lineage(kind: StructureGroup, direction: StudyDirection) -> Lineage | None:
    """Return the lineage of a structure with the best metric, the earliest of equals; None where none has one."""

    def find() -> Lineage | None:
        best = best_structure_score(kind, direction)
        holders = [o for o in kind.members.values() if best is not None and o.best_score(direction) == best]
        return min(holders, key=lambda lineage: lineage.first_number, default=None)

    return kind.derived(("best member", direction), find)


def structure_edge(lineage: Lineage, lineages: Lineages) -> int | None:
    """Return the smallest micro-batch that was too large for a lineage of the same structure and fitted none.

    What fits is decided by the ZeRO stage and offload almost alone.
    """
    kind = lineages.structure_group(lineage.params)
    if kind is None:
        return None
    alike = kind.members.values()

    def find() -> int | None:
        fits = max((other.largest_fit for other in alike if other.largest_fit is not None), default=0)
        return min(
            (o.smallest_too_large for o in alike if o.smallest_too_large is not None and o.smallest_too_large > fits),
            default=None,
        )

    return kind.derived("edge", find)


def _best(scores: Sequence[float], direction: StudyDirection) -> float | None:
    if not scores:
        return None
    return max(scores) if direction == StudyDirection.MAXIMIZE else min(scores)
