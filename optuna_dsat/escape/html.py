"""Text in figures of plotly, which reads some HTML in titles, labels and hover texts; pages are escaped by jinja."""

from __future__ import annotations

import html
import re
from typing import Any

from optuna_dsat.escape.terminal import one_line

__all__ = ["figure_text", "safe_figure"]

_FOREIGN_TAG = re.compile(r"<(?!/?(?:b|br|extra|i|sub|sup)>)", re.IGNORECASE)
"""Beginning of a tag that none of our figures uses."""


def figure_text(value: object, *, limit_chars: int = 300) -> str:
    """Return text that stands for itself in a figure, in one line.

    Args:
        value: The text.
        limit_chars: Characters that are kept of a longer one.
    """
    return html.escape(one_line(value, limit_chars=limit_chars), quote=False)


def safe_figure(data: Any) -> Any:
    """Return a figure's data and layout, as JSON values, with no tags in its texts but those for line breaks and style.

    Links in particular would be drawn as such.
    """
    if isinstance(data, str):
        return _FOREIGN_TAG.sub("&lt;", data)
    if isinstance(data, dict):
        return {key: safe_figure(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [safe_figure(value) for value in data]
    return data
