"""Tables on stdout, and lines on stderr."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from optuna_dsat.escape.terminal import cell, one_line, say, say_prose

if TYPE_CHECKING:
    from rich.console import Console

UNBOUNDED = 10_000
"""Width in characters at which lines are never folded."""

_PIPED_WIDTH = 160
"""Width of a table in characters if stdout is not a terminal."""
_BETWEEN = 3
"""Characters between two columns."""
_LONGEST_WORD = 40
"""Maximum length of a word, such as a path, that is not folded."""
_FOLDED_WORD = 16
"""The same on a terminal that is too narrow."""


def notify(text: str) -> None:
    """Print a line for the user on stderr."""
    say_prose(text, file=sys.stderr)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    drop: Sequence[str] = (),
    piped_width: int = _PIPED_WIDTH,
) -> None:
    """Print a table as wide as the terminal; long cells are folded between words.

    Markup in data is not interpreted. Columns whose heading is in ``right`` are right-aligned; ``piped_width`` applies
    if stdout is not a terminal.

    Of the columns in ``drop`` the empty ones are left out, and if the terminal is too narrow the others, one after
    another until the rest fits. Then long words are folded; if that is not enough, each row becomes a paragraph with
    one line per cell.
    """
    shown = [["" if value is None else one_line(value) for value in row] for row in rows]
    filled = [at for at, name in enumerate(headings) if name not in drop or any(row[at] for row in shown)]
    headings, shown = [headings[at] for at in filled], [[row[at] for at in filled] for row in shown]
    least = [_longest_word([heading, *(row[at] for row in shown)]) for at, heading in enumerate(headings)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else piped_width
    if sum(least) + _BETWEEN * (len(headings) - 1) > width:
        if drop:
            kept = [at for at, heading in enumerate(headings) if heading != drop[0]]
            fewer = [[row[at] for at in kept] for row in shown]
            kept_headings = [headings[at] for at in kept]
            print_table(kept_headings, fewer, right=right, drop=drop[1:], piped_width=piped_width)
            return
        least = [min(cells, _FOLDED_WORD) for cells in least]
        if sum(least) + _BETWEEN * (len(headings) - 1) > width:
            _print_paragraphs(headings, shown, width=width)
            return
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    texts = [[heading, *(row[at] for row in shown)] for at, heading in enumerate(headings)]
    widths = _widths(least, [max(map(cell_len, column)) for column in texts], room=width - _BETWEEN * (len(texts) - 1))
    for heading, cells in zip(headings, widths, strict=True):
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        table.add_column(cell(heading), overflow="fold", justify=justify, width=cells)
    for row in shown:
        table.add_row(*(Text(_folded(text, width)) for text, width in zip(row, widths, strict=True)))
    console_of(width).print(table)


def _folded(text: str, width: int) -> str:
    """Break words that are longer than a column after underscores and dots, where this helps."""

    def broken(word: re.Match[str]) -> str:
        lines = [""]
        for part in re.findall(r"[^_.]*[_.]*", word[0]):
            lines = [*lines, part] if lines[-1] and len(lines[-1] + part) > width else [*lines[:-1], lines[-1] + part]
        return "\n".join(lines)

    return re.sub(rf"\S{{{width + 1},}}", broken, text)


def _widths(least: Sequence[int], wanted: Sequence[int], *, room: int) -> list[int]:
    """Return the widths of columns: the least, and an equal share of the rest, or what is wanted where that is less."""
    result, left = list(least), room - sum(least)
    lacks = [max(0, full - cells) for full, cells in zip(wanted, least, strict=True)]
    for place, at in enumerate(sorted(range(len(lacks)), key=lacks.__getitem__)):
        more = min(lacks[at], left // (len(lacks) - place))
        result[at] += more
        left -= more
    return result


def console_of(width: int | None = None) -> Console:
    """Return a console for stdout, by default as wide as the terminal."""
    from rich.console import Console

    size = shutil.get_terminal_size()
    # Without a height, too, rich uses 80 columns if TERM is dumb.
    return Console(highlight=False, width=width or size.columns, height=size.lines)


def _longest_word(texts: Iterable[str]) -> int:
    return min(_LONGEST_WORD, max((len(word) for text in texts for word in text.split()), default=0))


def _print_paragraphs(headings: Sequence[str], rows: Sequence[Sequence[str]], *, width: int) -> None:
    for row in rows:
        for at, (heading, text) in enumerate(zip(headings, row, strict=True)):
            if text:
                label = f"{heading}: " if heading else ""
                lines = textwrap.wrap(f"{label}{text}", max(20, width - 2), break_on_hyphens=False)
                say("\n".join(f"{'  ' if at or further else ''}{line}" for further, line in enumerate(lines)))
