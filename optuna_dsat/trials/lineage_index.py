"""Mapping of all lineages of a study with incremental updates, indexed by structure.

Samplers and pruners accept any mapping of lineages. Other mappings are converted to a ``Lineages``. A ``Lineages`` kept
since the last decision retains all cached results that new trials do not affect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from optuna.study import StudyDirection

from optuna_dsat.trials.lineage import Lineage, lineage_key, structure
from optuna_dsat.trials.lineage_tree import Choice, Tree, choice_of

__all__ = [
    "Lineages",
    "StructureGroup",
    "best_lineage",
    "best_of_all",
    "best_score",
    "best_structure_score",
    "structure_edge",
]

T = TypeVar("T")


class _Memoised:
    """Caches values derived from an object until it changes."""

    def __init__(self) -> None:
        self._cache: dict[Hashable, Any] = {}

    def derived(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return ``compute()``, which depends on this object only; cached by ``key`` until the object changes."""
        if key not in self._cache:
            self._cache[key] = compute()
        result: T = self._cache[key]
        return result

    def _invalidate(self) -> None:
        self._cache.clear()


class StructureGroup(_Memoised):
    """The lineages of a structure (ZeRO stage and offload)."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.params = params
        """The structure."""
        self.members: dict[str, Lineage] = {}
        """Lineages by key, unordered."""
        self.complete = 0
        """Number of complete lineages, see ``Lineage.complete``."""
        self._choices: Counter[Choice] = Counter()

    def count(self, name: str, value: Any) -> int:
        """Return the number of complete lineages with this value of a knob."""
        return self._choices[choice_of(name, value)]

    def put(self, lineage: Lineage) -> None:
        """Add a lineage, or replace the lineage with the same key."""
        self.drop(lineage.key)
        self.members[lineage.key] = lineage
        self._count(lineage, 1)

    def drop(self, key: str) -> None:
        """Remove a lineage, if present."""
        self._invalidate()
        lineage = self.members.pop(key, None)
        if lineage is not None:
            self._count(lineage, -1)

    def _count(self, lineage: Lineage, by: int) -> None:
        if lineage.complete:
            self.complete += by
            for knob in lineage.params.items():
                self._choices[choice_of(*knob)] += by


class Lineages(_Memoised, Mapping[str, Lineage]):
    """Lineages by key, ordered by their first trial."""

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
        """Return the mapping if it is of this class, else a converted copy."""
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
        """Groups of lineages by the key of their structure."""
        return MappingProxyType(self._structures)

    def structure_group(self, params: Mapping[str, Any]) -> StructureGroup | None:
        """Return the lineages with the structure of some knobs, or None."""
        return self._structures.get(lineage_key(structure(params)))

    @property
    def tree(self) -> Tree:
        """The space as a tree, inferred from complete lineages."""
        return self._tree

    def put(self, lineage: Lineage) -> None:
        """Add a lineage, or replace the lineage with the same key (and hence the same knobs)."""
        self._invalidate()
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
        """Remove a lineage."""
        self._invalidate()
        lineage = self._all[key]
        if lineage.complete:
            self._tree.drop(lineage)
        del self._all[key]
        group = self._structures[lineage.structure_key]
        group.drop(key)
        if not group.members:
            del self._structures[lineage.structure_key]


def best_score(lineages: Lineages, direction: StudyDirection) -> float | None:
    """Return the best metric of all lineages, None without measurements."""
    shown = [s for group in lineages.structures.values() if (s := best_structure_score(group, direction)) is not None]
    return _best(shown, direction)


def best_structure_score(group: StructureGroup, direction: StudyDirection) -> float | None:
    """Return the best metric of a structure's lineages, None without measurements."""

    def find() -> float | None:
        return _best([s for o in group.members.values() if (s := o.best_score(direction)) is not None], direction)

    return group.derived(("best score", direction), find)


def best_lineage(group: StructureGroup, direction: StudyDirection) -> Lineage | None:
    """Return the lineage of a structure with the best metric, the earliest of ties; None without measurements."""

    def find() -> Lineage | None:
        best = best_structure_score(group, direction)
        holders = [o for o in group.members.values() if best is not None and o.best_score(direction) == best]
        return min(holders, key=lambda lineage: lineage.first_number, default=None)

    return group.derived(("best member", direction), find)


def best_of_all(lineages: Lineages, direction: StudyDirection) -> Lineage | None:
    """Return the lineage with the best metric of the study, the earliest of ties; None without measurements."""

    def find() -> Lineage | None:
        best = best_score(lineages, direction)
        result = (best_lineage(group, direction) for group in lineages.structures.values())
        holders = [lineage for lineage in result if lineage is not None and lineage.best_score(direction) == best]
        return min(holders, key=lambda lineage: lineage.first_number, default=None)

    return lineages.derived(("best of all", direction), find)


def structure_edge(lineage: Lineage, lineages: Lineages) -> int | None:
    """Return the smallest micro-batch that was too large for a lineage of the structure and never fitted, or None.

    Memory use depends almost only on the ZeRO stage and offload.
    """
    group = lineages.structure_group(lineage.params)
    if group is None:
        return None
    members = group.members.values()

    def find() -> int | None:
        fits = max((other.largest_fit for other in members if other.largest_fit is not None), default=0)
        return min(
            (o.smallest_too_large for o in members if o.smallest_too_large is not None and o.smallest_too_large > fits),
            default=None,
        )

    return group.derived("edge", find)


def _best(scores: Sequence[float], direction: StudyDirection) -> float | None:
    if not scores:
        return None
    return max(scores) if direction == StudyDirection.MAXIMIZE else min(scores)
