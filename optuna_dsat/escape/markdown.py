"""Text in Markdown, as optuna-dashboard renders it (GitHub's, without HTML)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from optuna_dsat.escape.terminal import one_line, plain
from optuna_dsat.runtime.files import MESSAGE_CHARS, TEXT_CHARS, shortened

__all__ = ["Markdown", "code", "fenced", "literal", "table"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!])")
_LIST_MARK = re.compile(r"^(\s*)(\d*)([-+=.)])(?=[-=\s]|$)")
_RUN = re.compile("`+")


class Markdown(str):
    """Text that is Markdown already: made by this module, or our own."""

    __slots__ = ()


def literal(value: object) -> Markdown:
    """Return text that stands for itself in a paragraph, heading or cell, in one line."""
    escaped = _SPECIAL.sub(r"\\\1", one_line(value).strip())
    return Markdown(_LIST_MARK.sub(r"\1\2\\\3", escaped))


def code(value: object) -> Markdown:
    """Return text as inline code, in one line."""
    shown = one_line(value, limit_chars=MESSAGE_CHARS)
    longest = max((len(run) for run in _RUN.findall(shown)), default=0)
    mark = "`" * (longest + 1)
    padding = " " if longest or shown != shown.strip() or not shown else ""
    return Markdown(f"{mark}{padding}{shown}{padding}{mark}")


def fenced(value: object, language: str = "", *, limit_chars: int = TEXT_CHARS) -> Markdown:
    """Return text as a code block.

    Args:
        value: The text.
        language: Language of its colours.
        limit_chars: Characters that are kept of a longer one.
    """
    shown = plain(shortened(str(value).rstrip(), limit_chars))
    longest = max((len(run) for run in _RUN.findall(shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markdown(f"{fence}{language}\n{shown}\n{fence}")


def table(headings: Sequence[object], rows: Sequence[Sequence[object]]) -> Markdown:
    """Return a table; what is no ``Markdown`` is escaped, a cell of None is empty."""
    lines = [[_cell(one) for one in line] for line in (headings, *rows)]
    lines.insert(1, ["---"] * len(headings))
    return Markdown("\n".join("| " + " | ".join(line) + " |" for line in lines))


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Markdown):
        return value.replace("\n", " ").replace("|", "\\|")
    return literal(value)
