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

from optuna_dsat.display.lines import LineView, lines_of
from optuna_dsat.display.live_state import LaunchInFlight, LiveState
from optuna_dsat.display.stopping import STOP_MESSAGE, Stopping
from optuna_dsat.escape.terminal import one_line, plain
from optuna_dsat.outcome import Outcome
from optuna_dsat.study import progress
from optuna_dsat.words import bytes_in_words, duration_in_words, metric_in_words

__all__ = ["LiveView", "make_observer", "render"]

_BAR_CELLS = 10
_OTHER_LINES = 7
"""Lines of the view that show no launch, with the empty line below it; one more where rounds have decided before."""
_PADDING = 2
_WORDS = 1
"""Index of the column that shrinks on a narrow terminal: the configuration in words."""
_MIN_WORDS_CELLS = 6
"""Least width of that column."""
_TIGHT = 0.9
"""Share of the device's memory from which the bar changes its colour."""

_STYLES = {Outcome.OUT_OF_MEMORY: "yellow", Outcome.HOST_OUT_OF_MEMORY: "yellow", Outcome.OUT_OF_DATA: "yellow"}


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the table of launches."""

    heading: str
    least_width: int
    """Width of the terminal from which it is shown."""
    cell: Callable[[LaunchInFlight], str | Text]
    justify: Literal["left", "right"] = "left"


def render(state: LiveState, now: float, *, width: int, height: int, ascii_only: bool = False) -> RenderableType:
    """Return what the terminal shows below the lines that scroll by.

    Args:
        state: The search.
        now: Present time of the state's clock, in seconds.
        width: Columns of the terminal.
        height: Lines of the terminal.
        ascii_only: Whether the terminal's encoding lacks block characters.
    """
    if state.search is None and not state.in_flight:
        return Text("")
    parts: list[RenderableType] = [Text("")]
    if state.in_flight:
        parts.append(_launches(state, now, width=width, height=height, ascii_only=ascii_only))
    if state.search is not None:
        lines = map(one_line, _summary(state, state.search, now))
        parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
    return Group(*parts)


def _launches(state: LiveState, now: float, *, width: int, height: int, ascii_only: bool) -> Table:
    columns = [
        _Column(heading="trial", least_width=0, justify="right", cell=lambda row: row.name),
        _Column(heading="configuration", least_width=0, cell=lambda row: row.words),
        _Column(heading="step", least_width=0, justify="right", cell=_steps),
        _Column(heading="samples/s", least_width=50, justify="right", cell=_speed),
        _Column(heading="to best", least_width=72, justify="right", cell=lambda row: _percent(state.against_best(row))),
        _Column(heading="memory", least_width=90, cell=lambda row: _memory(row, state.memory_bytes, ascii_only)),
        _Column(heading="since", least_width=62, justify="right", cell=lambda row: duration_in_words(now - row.since)),
    ]
    shown = [column for column in columns if width >= column.least_width]
    confirmed = state.search is not None and state.search.confirmed is not None
    room = max(1, height - _OTHER_LINES - confirmed)
    rows = sorted(state.in_flight, key=lambda row: row.since)
    visible = rows if len(rows) <= room else rows[: room - 1]
    lines = [[_text(column.cell(row)) for column in shown] for row in visible]
    if len(visible) < len(rows):
        lines.append([Text(), Text(f"and {len(rows) - len(visible)} more"), *[Text()] * (len(shown) - 2)])
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, _PADDING, 0, 0))
    widths = [max(len(column.heading), *(line[at].cell_len for line in lines)) for at, column in enumerate(shown)]
    spare = width - sum(widths) - _PADDING * (len(shown) - 1)
    widths[_WORDS] = max(_MIN_WORDS_CELLS, widths[_WORDS] + min(0, spare))
    for column, cells in zip(shown, widths, strict=True):
        table.add_column(
            column.heading, justify=column.justify, no_wrap=True, overflow="ellipsis", header_style="dim", width=cells
        )
    for line in lines:
        line[_WORDS] = Text(_shortened(line[_WORDS].plain, widths[_WORDS]))
        table.add_row(*line)
    return table


def _shortened(words: str, cells: int) -> str:
    """Return a configuration in at most ``cells`` cells: of a long one the micro-batch at its end is kept."""
    head, comma, tail = words.rpartition(", ")
    room = cells - len(tail) - 2
    if len(words) <= cells or not comma or room < _MIN_WORDS_CELLS:
        return words
    return f"{head[:room]}\u2026 {tail}"


def _text(cell: str | Text) -> Text:
    return Text(one_line(cell)) if isinstance(cell, str) else cell


def _steps(row: LaunchInFlight) -> str:
    if row.last_step is None:
        return ""
    return f"{row.step}/{row.last_step}" if row.step else "starts"


def _speed(row: LaunchInFlight) -> str:
    return "" if row.samples_per_s is None else f"{row.samples_per_s:.4g}"


def _percent(share: float | None) -> Text:
    if share is None:
        return Text("")
    return Text(f"{share:+.0%}", style="green" if share >= 0 else "")


def _memory(row: LaunchInFlight, limit_bytes: int, ascii_only: bool) -> Text:
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


def _summary(state: LiveState, search: progress.SearchStarted, now: float) -> list[str]:
    """Return the lines on the best of the search, the user's own config, the budget and the time left."""
    lines = []
    if search.confirmed is not None:
        value = metric_in_words(search.metric, search.confirmed.value)
        lines.append(f"Confirmed before: {value} (trial {search.confirmed.number}: {search.confirmed.words})")
    if state.best is not None:
        text = f"Best in the search: {metric_in_words(search.metric, state.best.value)}"
        if state.speed_up is not None:
            text += f", {state.speed_up:.2f}x your config"
        lines.append(f"{text} (trial {state.best.number}: {state.best.words})")
    if state.user_value is not None:
        lines.append(f"Your own config in the search: {metric_in_words(search.metric, state.user_value)}")
    if state.ended_search:
        budget = f"Rounds of finalists: {state.finalists_done} launches of at least {search.finalists}"
    else:
        budget = f"{state.launched} of {search.max_trials} launches, {len(state.in_flight)} in flight"
        if search.finalists:
            budget += f", then {search.finalists} of finalists"
    return [*lines, f"{budget}; {_left_in_words(state.left_s(now))}"]


def _left_in_words(left_s: float | None) -> str:
    """Return the time left, rounded up: to minutes, 5 minutes or a quarter of an hour."""
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
        self._state = LiveState()
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

    def __call__(self, event: progress.ProgressEvent) -> None:
        """Apply an event; lines scroll by for launches that ended, not for those that begin."""
        self._state.apply(event, self._clock())
        if isinstance(event, progress.TrialStarted | progress.FinalistStarted | progress.ProfileStarted):
            return
        metric = self._state.search.metric if self._state.search else ""
        for line in lines_of(event, metric):
            self._console.print(Text(plain(line), style=_style(event)))

    def _render(self) -> RenderableType:
        size = self._console.size
        shown = render(self._state, self._clock(), width=size.width, height=size.height, ascii_only=self._ascii)
        return Group(shown, Text(STOP_MESSAGE, style="bold")) if self._stopping.asked else shown


def _style(event: progress.ProgressEvent) -> str:
    if not isinstance(event, progress.TrialFinished):
        return ""
    if event.best:
        return "bold green"
    if event.outcome in (Outcome.MEASURED, Outcome.PRUNED):
        return "" if event.outcome is Outcome.MEASURED else "dim"
    return _STYLES.get(event.outcome, "red")


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
        yield LineView()
