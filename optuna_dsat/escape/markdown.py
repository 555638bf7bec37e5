"""Escape text for Markdown as rendered by optuna-dashboard (GitHub's dialect without HTML)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from optuna_dsat.escape.terminal import one_line, plain
from optuna_dsat.runtime.files import MESSAGE_CHARS, TEXT_CHARS, shortened

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!])")
_LIST_MARK = re.compile(r"^(\s*)(\d*)([-+=.)])(?=[-=\s]|$)")
_RUN = re.compile("`+")


class Markdown(str):
    """Text that is already Markdown: created by this module, or a constant."""

    __slots__ = ()


def literal(value: object) -> Markdown:
    """Return text shown literally in a paragraph, heading or cell, in a single line."""
    escaped = _SPECIAL.sub(r"\\\1", one_line(value).strip())
    return Markdown(_LIST_MARK.sub(r"\1\2\\\3", escaped))


def code(value: object) -> Markdown:
    """Return text as inline code, in a single line."""
    shown = one_line(value, limit_chars=MESSAGE_CHARS)
    longest = max((len(run) for run in _RUN.findall(shown)), default=0)
    mark = "`" * (longest + 1)
    padding = " " if longest or shown != shown.strip() or not shown else ""
    return Markdown(f"{mark}{padding}{shown}{padding}{mark}")


def fenced(value: object, language: str = "", *, limit_chars: int = TEXT_CHARS) -> Markdown:
    """Return text as a code block of limited length."""
    shown = plain(shortened(str(value).rstrip(), limit_chars))
    longest = max((len(run) for run in _RUN.findall(shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markdown(f"{fence}{language}\n{shown}\n{fence}")


def table(headings: Sequence[object], rows: Sequence[Sequence[object]]) -> Markdown:
    """Return a table; values other than ``Markdown`` are escaped, None becomes an empty cell."""
    lines = [[_cell(item) for item in line] for line in (headings, *rows)]
    lines.insert(1, ["---"] * len(headings))
    return Markdown("\n".join("| " + " | ".join(line) + " |" for line in lines))


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Markdown):
        return value.replace("\n", " ").replace("|", "\\|")
    return literal(value)
