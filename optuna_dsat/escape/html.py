"""Escape text for plotly figures, which interpret some HTML in titles, labels and hover texts; jinja escapes pages."""

from __future__ import annotations

import html
import re
from typing import Any

from optuna_dsat.escape.terminal import one_line

_FOREIGN_TAG = re.compile(r"<(?!/?(?:b|br|extra|i|sub|sup)>)", re.IGNORECASE)
"""Start of a tag that our figures do not use."""


def figure_text(value: object) -> str:
    """Return text that a figure shows literally, in a single line of limited length."""
    return html.escape(one_line(value, limit_chars=300), quote=False)


def safe_figure(data: Any) -> Any:
    """Return a figure's data and layout, as JSON values, without tags except for line breaks and style.

    Links in particular would become clickable.
    """
    if isinstance(data, str):
        return _FOREIGN_TAG.sub("&lt;", data)
    if isinstance(data, dict):
        return {key: safe_figure(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [safe_figure(value) for value in data]
    return data
