"""The revisions in a folder of Alembic's migrations, read without importing Alembic or running them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

__all__ = ["all_revisions", "newest_revision"]

_NAMES = ("revision", "down_revision")


def newest_revision(folder: Path) -> str | None:
    """Return the one revision that no other builds on; None if there is not one, or a file cannot be read.

    Args:
        folder: The folder ``versions`` of the migrations.
    """
    below = _revisions_below(folder)
    newest = set(below) - set().union(*below.values())
    return newest.pop() if len(newest) == 1 else None


def all_revisions(folder: Path) -> frozenset[str]:
    """Return every revision; none if a file cannot be read.

    Args:
        folder: As of ``newest_revision``.
    """
    return frozenset(_revisions_below(folder))


def _revisions_below(folder: Path) -> dict[str, set[Any]]:
    """Return each revision with those that it builds on; empty if a file cannot be read."""
    found: dict[str, set[Any]] = {}
    for path in folder.glob("*.py"):
        try:
            told = [line for line in path.read_text("utf-8").splitlines() if line.startswith(_NAMES)]
            tree = ast.parse("\n".join(told))
        except (OSError, SyntaxError, ValueError):
            return {}
        names = {name: value for node in tree.body for name, value in _assigned(node)}
        if isinstance(names.get("revision"), str):
            before = names.get("down_revision")
            found[names["revision"]] = set(before) if isinstance(before, tuple | list) else {before}
    return found


def _assigned(node: ast.stmt) -> list[tuple[str, Any]]:
    """Return the name and the value of a statement that gives a name a literal; empty for any other."""
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    value = getattr(node, "value", None)
    if not isinstance(target, ast.Name) or value is None:
        return []
    try:
        return [(target.id, ast.literal_eval(value))]
    except ValueError:
        return []
