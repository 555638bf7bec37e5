"""The tree of a conditional space, read off the lineages that were opened, and kept up to date with them.

It answers one question, for samplers that open no lineage twice: was everything below these knobs opened before?
A node stands for partial knobs and holds the lineages that extend them. Nodes are split on demand, so the work of
adding a lineage is proportional to the number of knobs, not to the number of lineages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from optuna.distributions import CategoricalDistribution

from optuna_dsat.trials.lineage import Lineage, agrees, canonical

__all__ = ["Choice", "Tree", "choice_of"]

Choice = tuple[str, bool, Any]
"""A knob with its value, as a key: equal where ``agrees`` says so."""

_MOST_NODES = 50_000
"""Nodes after which the tree is split anew: those of draws long ago are dropped."""
_MOST_ANSWERS = 8
"""Answers a node remembers, one for each set of hopeless structures."""


def choice_of(name: str, value: Any) -> Choice:
    """Return a knob's choice as a key of a dictionary."""
    value = canonical(value)
    try:
        hash(value)
    except TypeError:  # Optuna warns of choices of other types, but takes them
        value = repr(value)
    return name, isinstance(value, bool), value


class _Node:
    """The lineages that extend some knobs."""

    __slots__ = ("answers", "first", "members", "names", "splits", "whole")

    def __init__(self) -> None:
        self.members: dict[str, int] = {}
        """Keys of the lineages, with the number of their first trial."""
        self.first: str | None = None
        """The lineage whose first trial is the earliest."""
        self.names: Counter[str] = Counter()
        """How many members have a knob."""
        self.whole = 0
        """Members that have no further knob."""
        self.splits: dict[str, dict[Choice, _Node]] = {}
        """Knob -> choice -> the members with that choice."""
        self.answers: dict[Any, bool] = {}
        """What ``Tree.closed`` found, by hopeless structures, until a member changes."""

    def add(self, lineage: Lineage, depth: int) -> None:
        self.members[lineage.key] = lineage.first_number
        self.names.update(lineage.params.keys())
        self.whole += len(lineage.params) == depth
        if self.first is None or lineage.first_number < self.members[self.first]:
            self.first = lineage.key

    def drop(self, lineage: Lineage, depth: int) -> None:
        del self.members[lineage.key]
        self.names.subtract(lineage.params.keys())
        self.whole -= len(lineage.params) == depth
        if self.first == lineage.key:
            self.first = min(self.members, key=self.members.__getitem__, default=None)


class Tree:
    """The tree over ``lineages``, which its owner changes together with it."""

    def __init__(self, lineages: Mapping[str, Lineage]) -> None:
        self._lineages = lineages
        self._root = _Node()
        self._nodes = 1

    def add(self, lineage: Lineage) -> None:
        """Add a lineage; ``lineages`` holds it already."""
        for node, depth in self._path(lineage, create=True):
            node.add(lineage, depth)

    def drop(self, lineage: Lineage) -> None:
        """Take a lineage out."""
        for node, depth in self._path(lineage):
            node.drop(lineage, depth)

    def touch(self, lineage: Lineage) -> None:
        """Note that trials of a lineage changed, but not its knobs."""
        for _ in self._path(lineage):
            pass

    def closed(self, params: Mapping[str, Any], hopeless: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Return whether every lineage that extends partial knobs was opened before, or is hopeless.

        Below ``params``, the next knob is one that all lineages found there share, and its distribution tells
        the other choices.

        Args:
            params: Partial knobs; empty for the whole space.
            hopeless: Structures (partial knobs) of which no lineage can win.
        """
        if self._nodes > _MOST_NODES:
            self._forget()
        node: _Node | None = self._root
        for depth, (name, value) in enumerate(params.items(), start=1):
            node = None if node is None else self._branches(node, name, depth).get(choice_of(name, value))
        case = frozenset(frozenset(choice_of(*knob) for knob in kind.items()) for kind in hopeless)
        return self._closed(dict(params), node, hopeless, case)

    def _closed(
        self, params: dict[str, Any], node: _Node | None, hopeless: Sequence[Mapping[str, Any]], case: Any
    ) -> bool:
        if any(agrees(params, kind, strict=True) for kind in hopeless):
            return True
        if node is None or node.first is None:
            return False
        if node.whole:
            return True
        answer = node.answers.get(case)
        if answer is None:
            answer = self._all_closed(params, node, hopeless, case)
            if len(node.answers) >= _MOST_ANSWERS:
                node.answers.clear()
            node.answers[case] = answer
        return answer

    def _all_closed(
        self, params: dict[str, Any], node: _Node, hopeless: Sequence[Mapping[str, Any]], case: Any
    ) -> bool:
        first = self._lineages[node.first or ""]
        for name in first.params:
            if name in params or node.names[name] < len(node.members):
                continue
            distribution = first.trials[-1].distributions.get(name)
            if isinstance(distribution, CategoricalDistribution):
                branches = self._branches(node, name, len(params) + 1)
                return all(
                    self._closed({**params, name: value}, branches.get(choice_of(name, value)), hopeless, case)
                    for value in distribution.choices
                )
        return False

    def _branches(self, node: _Node, name: str, depth: int) -> dict[Choice, _Node]:
        """Return the members of a node by their choice of a knob; ``depth`` is the number of knobs then known."""
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
        """Yield the nodes that hold a lineage, with their depths; what they answered is out of date."""
        stack = [(self._root, 0)]
        while stack:
            node, depth = stack.pop()
            node.answers.clear()
            yield node, depth
            for name, branches in node.splits.items():
                if name in lineage.params:
                    choice = choice_of(name, lineage.params[name])
                    if create:
                        self._branch(branches, choice)
                    if choice in branches:
                        stack.append((branches[choice], depth + 1))

    def _forget(self) -> None:
        members: Iterable[str] = self._root.members
        self._root, self._nodes = _Node(), 1
        for key in members:
            self.add(self._lineages[key])
