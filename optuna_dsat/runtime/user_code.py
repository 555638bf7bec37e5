"""Tells the user's own code from installed libraries: places in it, and the whole numbers that it spells out."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from optuna_dsat.runtime.regular_file import read_regular

__all__ = [
    "LARGEST_SIZE",
    "Place",
    "constants",
    "is_installed",
    "is_size",
    "parsed_source",
    "place_of",
    "places_of",
]

Place = tuple[str, int]
"""File and line."""

LARGEST_SIZE = 2**20
"""Samples beyond which a number is no batch size."""
_LIBRARIES = ("site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}")
"""Parts of a path that tell an installed module from the user's own."""
_MOST_PLACES = 16
"""Frames of the user's that are kept of one call."""


def is_size(value: Any) -> bool:
    """Return whether a value may be a batch size."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE


def is_installed(file: str) -> bool:
    """Return whether a source file belongs to an installed package or to the standard library."""
    return any(part in _LIBRARIES for part in Path(file).parts)


def place_of(frame: FrameType | None) -> Place:
    """Return the place in the user's code that leads to a frame; that of the frame itself if none is the user's."""
    innermost = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    return next(_users_places(frame), innermost)


def places_of(frame: FrameType | None) -> list[Place]:
    """Return the places in the user's code that lead to a frame, the innermost first."""
    return [place for place, _ in zip(_users_places(frame), range(_MOST_PLACES), strict=False)]


def _users_places(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not is_installed(file) and "optuna_dsat" not in Path(file).parts:
            yield file, frame.f_lineno
        frame = frame.f_back


def parsed_source(file: str | Path) -> ast.Module:
    """Return the syntax tree of a Python file.

    Raises:
        OSError: If it cannot be read.
        SyntaxError: If it is not Python, or nested more deeply than this interpreter reads.
    """
    try:
        # Of what is not Python the interpreter reads the line that is wrong once more, from the file of the name it is
        # given: whoever reads a log of the kernel a second time waits for its next line. Warnings are the script's own,
        # when it runs.
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(read_regular(file), filename=os.devnull)
    except (RecursionError, MemoryError):
        raise SyntaxError("nested too deeply") from None
    except ValueError as error:
        raise SyntaxError(str(error)) from None


def constants(file: str, values: Collection[int]) -> list[dict[str, Any]]:
    """Return where a source file spells out whole numbers: ``file``, ``line``, ``value`` and ``name``.

    The name is that of what the number is given to: a variable, an argument, a key; empty if there is none. A file that
    cannot be read or parsed has none.

    Args:
        file: Path of the source.
        values: The numbers that are looked for.
    """
    try:
        tree = parsed_source(file)
    except (OSError, SyntaxError):
        return []
    return [
        {"file": file, "line": node.lineno, "value": node.value, "name": name}
        for node, name in _named_constants(tree)
        if is_size(node.value) and node.value in values
    ]


def _named_constants(tree: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    """Yield the constants of a tree, in its order, each with the name of what it is given to.

    Without recursion: a sum of a thousand terms is a tree of that depth.
    """
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, name = waiting.pop()
        if isinstance(node, ast.Constant):
            yield node, name
        else:
            waiting += reversed(list(_named_parts(node, name)))


def _named_parts(node: ast.AST, name: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the parts of a node, each with the name of what it is given to."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is not None:
            yield node.value, _name(targets[0])
    elif isinstance(node, ast.keyword):
        yield node.value, node.arg or ""
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        given = zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True)
        for arg, default in [*given, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
            if default is not None:
                yield default, arg.arg
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield value, str(key.value) if isinstance(key, ast.Constant) else ""
    else:
        passed_on = name if isinstance(node, ast.BinOp | ast.UnaryOp | ast.IfExp) else ""
        for child in ast.iter_child_nodes(node):
            yield child, passed_on


def _name(target: ast.expr) -> str:
    """Return the name that an assignment gives a value: of a variable, an attribute or a key."""
    if isinstance(target, ast.Name):
        return target.id
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return str(target.slice.value)
    return ""
