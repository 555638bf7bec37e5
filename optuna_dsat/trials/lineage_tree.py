"""The tree of a conditional space, inferred from the lineages that were opened, with incremental updates.

Samplers use it to check whether all lineages below some partial knobs were already opened, so that no lineage is opened
twice. A node represents partial knobs and contains the lineages that extend them. Nodes are split on demand, so that
the time to add a lineage is proportional to the number of knobs, not of lineages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from optuna.distributions import CategoricalDistribution

from optuna_dsat.config.ds_config import canonical_number
from optuna_dsat.trials.lineage import Lineage, agrees

__all__ = ["Choice", "Tree", "choice_of"]

Choice = tuple[str, bool, Any]
"""A knob with its value, as a key: equal if ``agrees`` holds."""

_MAX_NODES = 50_000
"""Number of nodes above which the tree is rebuilt, which drops nodes of past draws."""
_MAX_CACHED = 8
"""Largest number of results cached by a node, each for a set of hopeless structures."""


def choice_of(name: str, value: Any) -> Choice:
    """Return a knob's choice as a key of a dictionary."""
    value = canonical_number(value)
    try:
        hash(value)
    except TypeError:  # Optuna warns about choices of other types, but accepts them
        value = repr(value)
    return name, isinstance(value, bool), value


class _Node:
    """The lineages that extend some partial knobs."""

    __slots__ = ("cached", "complete_here", "first", "members", "names", "splits")

    def __init__(self) -> None:
        self.members: dict[str, int] = {}
        """Key of each lineage -> number of its first trial."""
        self.first: str | None = None
        """Key of the lineage with the earliest first trial, None without members."""
        self.names: Counter[str] = Counter()
        """Knob -> number of members that have it."""
        self.complete_here = 0
        """Number of members without further knobs."""
        self.splits: dict[str, dict[Choice, _Node]] = {}
        """Knob -> choice -> node of the members with that choice."""
        self.cached: dict[Any, bool] = {}
        """Results of ``Tree.closed`` by hopeless structures, until a member changes."""

    def add(self, lineage: Lineage, depth: int) -> None:
        self.members[lineage.key] = lineage.first_number
        self.names.update(lineage.params.keys())
        self.complete_here += len(lineage.params) == depth
        if self.first is None or lineage.first_number < self.members[self.first]:
            self.first = lineage.key

    def drop(self, lineage: Lineage, depth: int) -> None:
        del self.members[lineage.key]
        self.names.subtract(lineage.params.keys())
        self.complete_here -= len(lineage.params) == depth
        if self.first == lineage.key:
            self.first = min(self.members, key=self.members.__getitem__, default=None)


class Tree:
    """The tree over ``lineages``; its owner updates both together."""

    def __init__(self, lineages: Mapping[str, Lineage]) -> None:
        self._lineages = lineages
        self._root = _Node()
        self._nodes = 1

    def add(self, lineage: Lineage) -> None:
        """Add a lineage that is already in ``lineages``."""
        for node, depth in self._path(lineage, create=True):
            node.add(lineage, depth)

    def drop(self, lineage: Lineage) -> None:
        """Remove a lineage."""
        for node, depth in self._path(lineage):
            node.drop(lineage, depth)

    def touch(self, lineage: Lineage) -> None:
        """Invalidate cached results after a change of a lineage's trials."""
        for _ in self._path(lineage):
            pass

    def closed(self, params: Mapping[str, Any], hopeless: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Return whether every lineage that extends partial knobs was opened already or is hopeless.

        Below ``params``, the next knob is shared by all known lineages; its distribution provides the other choices.

        Args:
            params: Partial knobs; empty for the whole space.
            hopeless: Structures (partial knobs) that cannot win.
        """
        if self._nodes > _MAX_NODES:
            self._rebuild()
        node: _Node | None = self._root
        for depth, (name, value) in enumerate(params.items(), start=1):
            node = None if node is None else self._branches(node, name, depth).get(choice_of(name, value))
        cache_key = frozenset(frozenset(choice_of(*knob) for knob in record.items()) for record in hopeless)
        return self._closed(dict(params), node, hopeless, cache_key)

    def _closed(
        self, params: dict[str, Any], node: _Node | None, hopeless: Sequence[Mapping[str, Any]], cache_key: Any
    ) -> bool:
        if any(agrees(params, record, strict=True) for record in hopeless):
            return True
        if node is None or node.first is None:
            return False
        if node.complete_here:
            return True
        closed = node.cached.get(cache_key)
        if closed is None:
            closed = self._all_closed(params, node, hopeless, cache_key)
            if len(node.cached) >= _MAX_CACHED:
                node.cached.clear()
            node.cached[cache_key] = closed
        return closed

    def _all_closed(
        self, params: dict[str, Any], node: _Node, hopeless: Sequence[Mapping[str, Any]], cache_key: Any
    ) -> bool:
        first = self._lineages[node.first or ""]
        for name in first.params:
            if name in params or node.names[name] < len(node.members):
                continue
            distribution = first.trials[-1].distributions.get(name)
            if isinstance(distribution, CategoricalDistribution):
                branches = self._branches(node, name, len(params) + 1)
                return all(
                    self._closed({**params, name: value}, branches.get(choice_of(name, value)), hopeless, cache_key)
                    for value in distribution.choices
                )
        return False

    def _branches(self, node: _Node, name: str, depth: int) -> dict[Choice, _Node]:
        """Return the members of a node by their choice of a knob; ``depth`` is the number of knobs fixed so far."""
        if name not in node.splits:
            branches: dict[Choice, _Node] = {}
            for key in node.members:
                lineage = self._lineages[key]
                if name in lineage.params:
                    self._branch(branches, choice_of(name, lineage.params[name])).add(lineage, depth)
            node.splits[name] = branches
        return node.splits[name]

    def _branch(self, branches: dict[Choice, _Node], choice: Choice) -> _Node:
        if choice not in branches:
            branches[choice] = _Node()
            self._nodes += 1
        return branches[choice]

    def _path(self, lineage: Lineage, *, create: bool = False) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes that contain a lineage, with their depths, and clear their cached results."""
        stack = [(self._root, 0)]
        while stack:
            node, depth = stack.pop()
            node.cached.clear()
            yield node, depth
            for name, branches in node.splits.items():
                if name in lineage.params:
                    choice = choice_of(name, lineage.params[name])
                    if create:
                        self._branch(branches, choice)
                    if choice in branches:
                        stack.append((branches[choice], depth + 1))

    def _rebuild(self) -> None:
        members: Iterable[str] = self._root.members
        self._root, self._nodes = _Node(), 1
        for key in members:
            self.add(self._lineages[key])
