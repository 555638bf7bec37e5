"""Text of a script's, made fit to be stored and shown: no part that cannot be encoded, and no more than is read."""

from __future__ import annotations

import re

__all__ = ["MESSAGE_CHARS", "TEXT_CHARS", "shortened", "storable"]

MESSAGE_CHARS = 2_000
"""Longest message of an error that is kept beside a launch; its log has the whole."""
TEXT_CHARS = 8_000
"""Longest text of an event, such as a traceback."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def storable(text: str) -> str:
    """Return the text without what databases and encodings refuse: NUL characters and halves of surrogate pairs."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\x00", "\N{SYMBOL FOR NULL}"))


def shortened(text: str, limit_chars: int) -> str:
    """Return the text, of a longer one beginning and end with the number of characters between them.

    Args:
        text: The text.
        limit_chars: Characters to which it is returned whole, and of a longer one that are kept.
    """
    if len(text) <= limit_chars:
        return text
    head = limit_chars // 3
    left_out = len(text) - limit_chars
    return f"{text[:head]} [... {left_out} characters left out ...] {text[head + left_out :]}"
