"""Tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from optuna_dsat.escape.terminal import cell

__all__ = ["UNBOUNDED", "print_table"]

UNBOUNDED = 10_000
"""Width in characters at which no line is folded."""

_PIPED_WIDTH = 160
"""Columns of a table if stdout is no terminal."""


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    piped_width: int = _PIPED_WIDTH,
) -> None:
    """Print a table as wide as the terminal; long cells are folded, and data are no markup.

    Args:
        headings: Headings of the columns.
        rows: Cells by row; None is an empty cell.
        right: Headings of the columns that are justified right.
        piped_width: Width in characters if stdout is no terminal.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(cell(heading), overflow="fold", justify="right" if heading in right else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    Console(highlight=False, width=None if sys.stdout.isatty() else piped_width).print(table)
