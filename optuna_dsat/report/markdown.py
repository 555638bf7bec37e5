"""Small pieces of Markdown, as optuna-dashboard renders it (GitHub's, without HTML)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from optuna_dsat.secrecy.shapes import hidden_data

__all__ = ["OWN_TEXT", "code", "fenced", "json_block", "keep_own_text", "redacted", "table"]

OWN_TEXT = "*Written by optuna-dsat, anew at every refresh. What you write below this line is kept.*"
"""Last line of every generated note."""


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; a cell of None is empty."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("\n", " ").replace("|", "\\|")


def code(text: str) -> str:
    """Return text as inline code."""
    mark = "``" if "`" in text else "`"
    padding = " " if "`" in text else ""
    return f"{mark}{padding}{text}{padding}{mark}"


def fenced(text: str, language: str = "") -> str:
    """Return text as a code block."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def json_block(data: Mapping[str, Any]) -> str:
    """Return a JSON object as a block, without secrets."""
    return fenced(json.dumps(redacted(data), indent=2), "json")


def redacted(data: Any) -> Any:
    """Return JSON data with the secrets in it replaced by ``***``."""
    return hidden_data(data)


def keep_own_text(generated: str, present: str) -> str:
    """Return the note to save: the generated text, and below it what people wrote into the present note.

    In a note by optuna-dsat that is the text below ``OWN_TEXT``; any other note is kept whole.
    """
    _, mark, own = present.partition(OWN_TEXT)
    own = (own if mark else present).strip()
    return f"{generated.rstrip()}\n\n---\n{OWN_TEXT}\n" + (f"\n{own}\n" if own else "")
