"""Building blocks of notes for optuna-dashboard, in addition to ``optuna_dsat.escape.markdown``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from optuna_dsat.escape.markdown import Markdown, fenced
from optuna_dsat.secrecy.shapes import hidden_data

__all__ = ["OWN_TEXT", "WHOLE_CHARS", "json_block", "keep_own_text"]

OWN_TEXT = "*Written by optuna-dsat, anew at every refresh. What you write below this line is kept.*"
"""Last line of every generated note."""
WHOLE_CHARS = 2**17
"""Maximum length of a config or list of commands in a note; longer texts were not written by this program."""


def json_block(data: Mapping[str, Any]) -> Markdown:
    """Return a JSON object as a code block, without secrets."""
    return fenced(json.dumps(hidden_data(data), indent=2), "json", limit_chars=WHOLE_CHARS)


def keep_own_text(generated: str, present: str) -> str:
    """Return the note to save: the generated text followed by the users' text of the present note.

    In a note by optuna-dsat the users' text is the text below ``OWN_TEXT``; any other note is kept whole.
    """
    _, mark, own = present.partition(OWN_TEXT)
    own = (own if mark else present).strip()
    return f"{generated.rstrip()}\n\n---\n{OWN_TEXT}\n" + (f"\n{own}\n" if own else "")
