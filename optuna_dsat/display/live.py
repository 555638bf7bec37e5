"""The live view of a search on stderr: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from optuna_dsat.display.lines import Lines, lines_of
from optuna_dsat.display.live_state import Board, Row
from optuna_dsat.display.stopping import ASKED, Stopping
from optuna_dsat.outcome import Outcome
from optuna_dsat.study import progress
from optuna_dsat.words import bytes_in_words, duration_in_words, metric_in_words

__all__ = ["LiveView", "make_observer", "render"]

_BAR_CELLS = 10
_OTHER_LINES = 7
"""Lines of the view that are no launch, and the line below it."""
_PADDING = 2
_WORDS = 1
"""Place of the column that gives way where the terminal is narrow: the configuration in words ..."""
_LEAST_WORDS = 6
"""... down to so many cells."""
_TIGHT = 0.9
"""Share of the memory from which the bar is shown in another colour."""

_STYLES = {Outcome.OUT_OF_MEMORY: "yellow", Outcome.HOST_OUT_OF_MEMORY: "yellow", Outcome.OUT_OF_DATA: "yellow"}


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the table of launches."""

    heading: str
    least_width: int
    """Width of the terminal from which it is shown."""
    cell: Callable[[Row], str | Text]
    justify: Literal["left", "right"] = "left"


def render(board: Board, now: float, *, width: int, height: int, ascii_only: bool = False) -> RenderableType:
    """Return what the terminal shows below the lines that scroll by.

    Args:
        board: The search.
        now: Present time of the board's clock, in seconds.
        width: Columns of the terminal.
        height: Lines of the terminal.
        ascii_only: Whether the terminal's encoding lacks block characters.
    """
    if board.search is None and not board.in_flight:
        return Text("")
    parts: list[RenderableType] = [Text("")]
    if board.in_flight:
        parts.append(_launches(board, now, width=width, height=height, ascii_only=ascii_only))
    if board.search is not None:
        parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in _summary(board, board.search, now)]
    return Group(*parts)


def _launches(board: Board, now: float, *, width: int, height: int, ascii_only: bool) -> Table:
    columns = [
        _Column(heading="trial", least_width=0, justify="right", cell=lambda row: row.name),
        _Column(heading="configuration", least_width=0, cell=lambda row: row.words),
        _Column(heading="step", least_width=0, justify="right", cell=_steps),
        _Column(heading="samples/s", least_width=50, justify="right", cell=_speed),
        _Column(heading="to best", least_width=72, justify="right", cell=lambda row: _percent(board.against_best(row))),
        _Column(heading="memory", least_width=90, cell=lambda row: _memory(row, board.memory_bytes, ascii_only)),
        _Column(heading="since", least_width=62, justify="right", cell=lambda row: duration_in_words(now - row.since)),
    ]
    shown = [column for column in columns if width >= column.least_width]
    room = max(1, height - _OTHER_LINES)
    rows = sorted(board.in_flight, key=lambda row: row.since)
    visible = rows if len(rows) <= room else rows[: room - 1]
    lines = [[_text(column.cell(row)) for column in shown] for row in visible]
    if len(visible) < len(rows):
        lines.append([Text(), Text(f"and {len(rows) - len(visible)} more"), *[Text()] * (len(shown) - 2)])
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, _PADDING, 0, 0))
    widths = [max(len(column.heading), *(line[at].cell_len for line in lines)) for at, column in enumerate(shown)]
    spare = width - sum(widths) - _PADDING * (len(shown) - 1)
    widths[_WORDS] = max(_LEAST_WORDS, widths[_WORDS] + min(0, spare))
    for column, cells in zip(shown, widths, strict=True):
        table.add_column(
            column.heading, justify=column.justify, no_wrap=True, overflow="ellipsis", header_style="dim", width=cells
        )
    for line in lines:
        line[_WORDS] = Text(_shortened(line[_WORDS].plain, widths[_WORDS]))
        table.add_row(*line)
    return table


def _shortened(words: str, cells: int) -> str:
    """Return a configuration in so many cells: of a long one the micro-batch at its end is kept."""
    head, comma, tail = words.rpartition(", ")
    room = cells - len(tail) - 2
    if len(words) <= cells or not comma or room < _LEAST_WORDS:
        return words
    return f"{head[:room]}\u2026 {tail}"


def _text(cell: str | Text) -> Text:
    return Text(cell) if isinstance(cell, str) else cell


def _steps(row: Row) -> str:
    if row.last_step is None:
        return ""
    return f"{row.step}/{row.last_step}" if row.step else "starts"


def _speed(row: Row) -> str:
    return "" if row.samples_per_s is None else f"{row.samples_per_s:.4g}"


def _percent(share: float | None) -> Text:
    if share is None:
        return Text("")
    return Text(f"{share:+.0%}", style="green" if share >= 0 else "")


def _memory(row: Row, limit_bytes: int, ascii_only: bool) -> Text:
    if row.peak_bytes <= 0:
        return Text("")
    if limit_bytes <= 0:
        return Text(bytes_in_words(row.peak_bytes))
    share = min(1.0, row.peak_bytes / limit_bytes)
    full, empty = ("#", "-") if ascii_only else ("█", "░")
    cells = round(share * _BAR_CELLS)
    text = Text(full * cells, style="yellow" if share >= _TIGHT else "green")
    text.append(empty * (_BAR_CELLS - cells), style="dim")
    text.append(f" {bytes_in_words(row.peak_bytes)} of {bytes_in_words(limit_bytes)}", style="none")
    return text


def _summary(board: Board, search: progress.SearchStarted, now: float) -> list[str]:
    """Return the lines on the best so far, the user's own config, the budget and the time left."""
    lines = []
    if board.best is not None:
        text = f"Best so far: {metric_in_words(search.metric, board.best.value)}"
        if board.speed_up is not None:
            text += f", {board.speed_up:.2f}x your config"
        lines.append(f"{text} (trial {board.best.number}: {board.best.words})")
    if board.user_value is not None:
        lines.append(f"Your own config: {metric_in_words(search.metric, board.user_value)}")
    if board.ended_search:
        budget = f"Finalists: {board.finalists_done} of {search.finalists} measured again"
    else:
        budget = f"{board.launched} of {search.max_trials} launches, {len(board.in_flight)} in flight"
        if search.finalists:
            budget += f", then {search.finalists} finalists"
    return [*lines, f"{budget}; {_left_in_words(board.left_s(now))}"]


def _left_in_words(left_s: float | None) -> str:
    """Return the time left, no finer than it is known."""
    if left_s is None:
        return "the time left is not known yet"
    if left_s < 60:
        return "less than a minute left"
    minutes = -(-left_s // 60)
    step = 1 if minutes < 10 else 5 if minutes < 60 else 15
    return f"at most about {duration_in_words(-(-minutes // step) * step * 60).removesuffix(' 0 s')} left"


class LiveView:
    """A table of the launches in flight below the lines of those that ended: for terminals."""

    def __init__(self, console: Console, stopping: Stopping, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._stopping = stopping
        self._clock = clock
        self._board = Board()
        self._ascii = not console.encoding.lower().startswith("utf")
        self._live = Live(
            console=console,
            refresh_per_second=4,
            transient=True,
            get_renderable=self._render,
            vertical_overflow="crop",
        )

    def __enter__(self) -> LiveView:
        """Start drawing."""
        self._live.start()
        self._stopping.live = True
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing and leave the terminal clean."""
        self._stopping.live = False
        self._live.stop()

    def __call__(self, news: progress.ProgressEvent) -> None:
        """Take in a piece of news; what scrolls by are the launches that ended, not those that begin."""
        self._board.take(news, self._clock())
        if isinstance(news, progress.TrialStarted | progress.FinalistStarted | progress.ProfileStarted):
            return
        metric = self._board.search.metric if self._board.search else ""
        for line in lines_of(news, metric):
            self._console.print(Text(line, style=_style(news)))

    def _render(self) -> RenderableType:
        size = self._console.size
        shown = render(self._board, self._clock(), width=size.width, height=size.height, ascii_only=self._ascii)
        return Group(shown, Text(ASKED, style="bold")) if self._stopping.asked else shown


def _style(news: progress.ProgressEvent) -> str:
    if not isinstance(news, progress.TrialFinished):
        return ""
    if news.best:
        return "bold green"
    if news.outcome in (Outcome.MEASURED, Outcome.PRUNED):
        return "" if news.outcome is Outcome.MEASURED else "dim"
    return _STYLES.get(news.outcome, "red")


@contextmanager
def make_observer(*, quiet: bool, stopping: Stopping | None = None) -> Iterator[progress.Observer]:
    """Yield the observer that suits stderr: a live view on a terminal, lines when piped, nothing when quiet.

    ``NO_COLOR`` leaves out all colours. A terminal that cannot move its cursor (``TERM=dumb``) gets lines.
    """
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda _: None
    elif console.is_terminal and not console.is_dumb_terminal and sys.stderr.isatty():
        with LiveView(console, stopping or Stopping()) as view:
            yield view
    else:
        yield Lines()
