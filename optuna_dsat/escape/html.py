"""Text in figures of plotly, which reads some HTML in titles, labels and hover texts; pages are escaped by jinja."""

from __future__ import annotations

import html

from optuna_dsat.escape.terminal import one_line

__all__ = ["figure_text"]


def figure_text(value: object, *, limit_chars: int = 300) -> str:
    """Return text that stands for itself in a figure, in one line.

    Args:
        value: The text.
        limit_chars: Characters that are kept of a longer one.
    """
    return html.escape(one_line(value, limit_chars=limit_chars), quote=False)
