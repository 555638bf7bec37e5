"""The live view of a search: on a terminal, in the output of a notebook's cell; plain lines on stderr elsewhere."""

from __future__ import annotations

import importlib
import io
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.table import Table
from rich.text import Text

from optuna_dsat.display.lines import LineView, lines_of
from optuna_dsat.display.stopping import STOP_MESSAGE, Stopping
from optuna_dsat.escape.terminal import one_line, outliving_the_terminal, plain
from optuna_dsat.metrics import LARGER_IS_BETTER
from optuna_dsat.outcome import Outcome
from optuna_dsat.study import progress
from optuna_dsat.study.live_state import LaunchInFlight, LiveState, time_left_in_words
from optuna_dsat.words import count_in_words, duration_in_words, metric_in_words, times_in_words

_BAR_CELLS = 10
_PADDING = 2
_WORDS = 1
"""Index of the column that is folded on a narrow terminal: the description of the configuration."""
_MIN_WORDS_CELLS = 12
"""Minimum width of the folded column."""
_MOST_WORDS_LINES = 3
"""Maximum number of lines of a configuration's description."""
_TIGHT = 0.9
"""Share of the device's memory above which the bar changes its colour."""
_REFRESH_S, _END_S = 0.25, 2.0
"""Interval between two updates, and longest wait for the last update, in seconds."""
_NOTEBOOK_CELLS, _NOTEBOOK_ROWS, _NOTEBOOK_S = 110, 30, 1.0
"""Size of the view in a notebook, in characters, and interval between two updates, in seconds."""
_NOTEBOOK_HTML = """<div style="display: flex; flex-direction: column-reverse; max-height: 14em; overflow: auto">
<pre style="margin: 0">{}</pre></div>
<pre style="margin: 0">{}</pre>"""
"""Finished launches, of which the last are in view, above the state of the search."""
_KEPT_LINES = 200
"""Number of latest scrolled lines, which are printed again after a resize."""

_STYLES = {Outcome.OUT_OF_MEMORY: "yellow", Outcome.HOST_OUT_OF_MEMORY: "yellow", Outcome.OUT_OF_DATA: "yellow"}


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the table of launches."""

    heading: str
    least_width: int
    """Minimum width of the terminal to show the column."""
    cell: Callable[[LaunchInFlight], str | Text]
    least_cells: int = 0
    """Minimum width of the column, so that other columns do not move between steps."""
    justify: Literal["left", "right"] = "left"


def render(
    state: LiveState,
    now: float,
    *,
    width: int,
    height: int,
    ascii_only: bool = False,
    stopping: bool = False,
) -> RenderableType:
    """Return the content of the terminal below the scrolling lines."""
    below: list[Text] = []
    if state.phase:
        what, bracket, remark = state.phase.partition(" (")
        since = duration_in_words(now - state.phase_since)
        below += _folded(f"{what[:1].upper()}{what[1:]}, {since}{bracket}{remark}", width)
    if state.search is not None:
        below += [line for words in _summary(state, state.search, now) for line in _folded(words, width)]
    if stopping:
        below += _folded(STOP_MESSAGE, width, style="bold")
    in_flight = state.in_flight
    if not below and not in_flight:
        return Text("")
    room = max(1, height - len(below) - 3)  # the empty line above, the headings, and the line of the cursor
    table = [_launches(state, in_flight, now, width=width, room=room, ascii_only=ascii_only)] if in_flight else []
    return Group(Text(""), *table, *below)


def _folded(text: str, width: int, *, style: str = "") -> list[Text]:
    """Return a text as lines of a width, folded between words."""
    lines = textwrap.wrap(one_line(text), max(1, width), break_on_hyphens=False)
    return [Text(line, no_wrap=True, style=style) for line in lines]


def _launches(
    state: LiveState, in_flight: Sequence[LaunchInFlight], now: float, *, width: int, room: int, ascii_only: bool
) -> Table:
    best = None if state.best is None else state.best.speed.samples_per_s
    columns = [
        _Column(heading="trial", least_width=0, justify="right", cell=lambda row: row.name),
        _Column(heading="configuration", least_width=0, cell=lambda row: row.words),
        _Column(heading="now", least_width=0, cell=lambda row: row.doing, least_cells=12 * (width >= 60)),
        _Column(heading="samples/s", least_width=72, justify="right", cell=_speed),
        _Column(heading="to best", least_width=84, justify="right", cell=lambda row: _percent(row.against(best))),
        _Column(heading="memory", least_width=100, cell=lambda row: _memory(row, state.memory_bytes, ascii_only)),
        _Column(heading="since", least_width=46, justify="right", cell=lambda row: duration_in_words(now - row.since)),
    ]
    shown = [column for column in columns if width >= column.least_width]
    rows = [[_text(column.cell(row)) for column in shown] for row in sorted(in_flight, key=lambda row: row.since)]
    widths = [
        max(column.least_cells, len(column.heading), *(line[at].cell_len for line in rows))
        for at, column in enumerate(shown)
    ]
    spare = width - sum(widths) - _PADDING * (len(shown) - 1)
    widths[_WORDS] = max(_MIN_WORDS_CELLS, widths[_WORDS] + min(0, spare))
    ellipsis = " ..." if ascii_only else " \u2026"
    words = [
        textwrap.wrap(
            line[_WORDS].plain,
            widths[_WORDS],
            break_on_hyphens=False,
            max_lines=_MOST_WORDS_LINES,
            placeholder=ellipsis,
        )
        for line in rows
    ]
    count = _fitting([max(1, len(lines)) for lines in words], room)
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, _PADDING, 0, 0))
    for column, cells in zip(shown, widths, strict=True):
        table.add_column(
            column.heading, justify=column.justify, no_wrap=True, overflow="ellipsis", header_style="dim", width=cells
        )
    for line, folded in zip(rows[:count], words, strict=False):
        line[_WORDS] = Text("\n".join(folded))
        table.add_row(*line)
    if count < len(rows):
        table.add_row(Text(), Text(f"and {len(rows) - count} more"), *[Text()] * (len(shown) - 2))
    return table


def _fitting(heights: Sequence[int], room: int) -> int:
    """Return how many rows of these heights fit; if not all fit, a line is reserved for a note."""
    if sum(heights) <= room:
        return len(heights)
    count, used = 0, 1
    while count < len(heights) and used + heights[count] <= room:
        used += heights[count]
        count += 1
    return count


def _text(cell: str | Text) -> Text:
    return Text(one_line(cell)) if isinstance(cell, str) else cell


def _speed(row: LaunchInFlight) -> str:
    return "" if row.samples_per_s is None else count_in_words(row.samples_per_s)


def _percent(share: float | None) -> Text:
    if share is None:
        return Text("")
    return Text(f"{share:+.0%}".replace("-0%", "+0%"), style="green" if share >= 0 else "")


def _memory(row: LaunchInFlight, limit_bytes: int, ascii_only: bool) -> Text:
    if row.peak_bytes <= 0 or limit_bytes <= 0:
        return Text(row.memory_in_words(limit_bytes))
    share = min(1.0, row.peak_bytes / limit_bytes)
    full, empty = ("#", "-") if ascii_only else ("█", "░")
    cells = round(share * _BAR_CELLS)
    text = Text(full * cells, style="yellow" if share >= _TIGHT else "green")
    text.append(empty * (_BAR_CELLS - cells), style="dim")
    text.append(f" {row.memory_in_words(limit_bytes)}", style="none")
    return text


def _summary(state: LiveState, search: progress.SearchStarted, now: float) -> list[str]:
    """Return the lines on the best configuration, the user's config, the budget and the remaining time."""
    lines = []
    if search.confirmed is not None:
        best = search.confirmed
        lines.append(f"Confirmed before: {best.speed.text} (trial {best.number}: {best.words})")
    if state.best is not None:
        text = f"Best in the search: {state.best.speed.text}"
        if state.speed_up is not None and state.best.speed.value != state.user_value:
            text += f", {times_in_words(state.speed_up)}x your config"
        lines.append(f"{text} (trial {state.best.number}: {state.best.words})")
    if state.user_value is not None:
        lines.append(f"Your config in the search: {_speed_of_own(state, search, state.user_value)}")
    running = f"{len(state.in_flight)} running"
    if state.ended_search:
        done = f"Finalists measured again: {state.finalists_done} of at least {state.finalists} done, {running}"
    else:
        elsewhere = f", {state.elsewhere} in other workers" if state.elsewhere else ""
        then = f", then some {state.finalists} launches to compare the finalists" if state.finalists else ""
        done = f"{state.done} of {search.max_trials} done, {running}{elsewhere}{then}"
    return [*lines, f"{done}; {time_left_in_words(state.left_s(now))}"]


def _speed_of_own(state: LiveState, search: progress.SearchStarted, value: float) -> str:
    """Describe the speed of the user's config; samples/s are derived from the best's if proportional to the metric."""
    best = state.best
    if best is None or search.metric not in LARGER_IS_BETTER:
        return metric_in_words(search.metric, value, device=search.device)
    return best.speed.at(value).text


class LiveView:
    """A table of running launches below the lines of finished launches: for terminals."""

    _refresh_s = _REFRESH_S

    def __init__(self, console: Console, stopping: Stopping) -> None:
        self._console = console
        self._stopping = stopping
        self._state = LiveState()
        self._ascii = not console.encoding.lower().startswith("utf")
        self._scrolled: deque[Text] = deque(maxlen=_KEPT_LINES)
        self._size = console.size
        self._live = self._new_live()
        self._over = threading.Event()
        self._drawing = threading.RLock()
        self._thread = threading.Thread(target=self._draw_on, name="live view", daemon=True)

    def _new_live(self) -> Live | _CellOutput:
        return Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            get_renderable=self._render,
            vertical_overflow="crop",
        )

    def __enter__(self) -> LiveView:
        """Start drawing."""
        self._live.start()
        self._thread.start()
        self._stopping.live = True
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing and leave the terminal clean."""
        self._stopping.live = False
        self._over.set()
        self._thread.join(_END_S)
        with outliving_the_terminal():
            self._live.stop()

    def __call__(self, event: progress.ProgressEvent) -> None:
        """Apply an event; finished launches are printed as scrolling lines, starting launches are not."""
        with self._drawing, outliving_the_terminal():
            self._state.apply(event, time.monotonic())
            if isinstance(event, progress.TrialStarted | progress.FinalistStarted | progress.ProfileStarted):
                return
            lines = [Text(plain(line), style=_style(event)) for line in lines_of(event)]
            if lines:
                self._follow_size()
            for line in lines:
                self._scrolled.append(line)
                self._console.print(line)

    def _draw_on(self) -> None:
        while not self._over.wait(self._refresh_s):
            with self._drawing, outliving_the_terminal():
                self._follow_size()
                self._live.refresh()

    def _follow_size(self) -> None:
        """Redraw everything if the terminal was resized, because it may have rewrapped the earlier lines."""
        size = self._console.size
        if size == self._size:
            return
        self._size = size
        self._live.stop()
        self._console.control(Control.clear(), Control.home())
        self._live = self._new_live()
        for line in self._last_lines(size.width, size.height):
            self._console.print(line)
        self._live.start()

    def _last_lines(self, width: int, height: int) -> list[Text]:
        """Return the latest scrolled lines that fit on the terminal."""
        room, shown = height // 2, []
        for line in reversed(tuple(self._scrolled)):
            room -= len(line.wrap(self._console, width))
            if room < 0:
                break
            shown.append(line)
        return shown[::-1]

    def _render(self) -> RenderableType:
        size = self._console.size
        return render(
            self._state,
            time.monotonic(),
            width=size.width,
            height=size.height,
            ascii_only=self._ascii,
            stopping=self._stopping.asked,
        )


class NotebookView(LiveView):
    """The same in the output of a notebook's cell, as HTML.

    Args:
        notebook: The module ``IPython.display``.
    """

    _refresh_s = _NOTEBOOK_S

    def __init__(self, notebook: Any, stopping: Stopping) -> None:
        self._notebook = notebook
        nowhere = Console(quiet=True, width=_NOTEBOOK_CELLS, height=_NOTEBOOK_ROWS, force_jupyter=False, _environ={})
        super().__init__(nowhere, stopping)

    def _new_live(self) -> _CellOutput:
        return _CellOutput(self._notebook, self._html)

    def _html(self) -> str:
        state, below = self._state, self._render()
        if self._over.is_set():  # it stays in the notebook: without what remained to be done
            below = Text(
                "" if state.search is None else "\n".join(_summary(state, state.search, time.monotonic())[:-1])
            )
        return _NOTEBOOK_HTML.format(_as_html(*self._scrolled), _as_html(below))


class _CellOutput:
    """HTML in the output of a notebook's cell, updated in place."""

    def __init__(self, notebook: Any, html: Callable[[], str]) -> None:
        self._notebook = notebook
        self._html = html
        self._shown = ""

    def start(self) -> None:
        """Show it below the outputs so far."""
        self._shown = self._html()
        self._handle = self._notebook.display(self._notebook.HTML(self._shown), display_id=True)

    def refresh(self) -> None:
        """Show its current state if that has changed."""
        html = self._html()
        if html != self._shown:
            self._shown = html
            self._handle.update(self._notebook.HTML(html))

    stop = refresh


def _as_html(*content: RenderableType) -> str:
    """Return a console's output as HTML, with control characters escaped."""
    console = Console(
        record=True, file=io.StringIO(), width=_NOTEBOOK_CELLS, highlight=False, force_jupyter=False, _environ={}
    )
    console.print(*content, sep="\n")
    return console.export_html(inline_styles=True, code_format="{code}").strip("\n")


def _notebook_display() -> Any:
    """Return ``IPython.display`` if this process is the kernel of a notebook, else None; IPython is not imported."""
    ipython = sys.modules.get("IPython")
    kernel = None if ipython is None else getattr(ipython.get_ipython(), "kernel", None)
    return None if kernel is None else importlib.import_module("IPython.display")


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
    """Yield the observer: a live view in a notebook or on a terminal, lines when piped, nothing when quiet.

    ``NO_COLOR`` disables all colours. Lines are used on terminals that cannot move the cursor (``TERM=dumb``).
    """
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda _: None
    elif (notebook := _notebook_display()) is not None:
        with NotebookView(notebook, stopping or Stopping()) as view:
            yield view
    elif console.is_terminal and not console.is_dumb_terminal and sys.stderr.isatty():
        with LiveView(console, stopping or Stopping()) as view:
            yield view
    else:
        lines = LineView()
        try:
            yield lines
        finally:
            lines.close()
