"""The common look of all figures: colours, symbols, layout, and figures without data.

Figures set no page or text colour, so they suit light and dark pages. Emphasis is drawn in ``INK``, which the report
replaces with its text colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial

from optuna_dsat.config.structures import Structure
from optuna_dsat.errors import UsageError
from optuna_dsat.escape.html import figure_text
from optuna_dsat.escape.shell import install_command
from optuna_dsat.metrics import METRICS, SMALLER_IS_BETTER
from optuna_dsat.outcome import Outcome
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import STRUCTURE, ZERO_STAGE
from optuna_dsat.words import count_in_words, flops_in_words, metric_in_words, slot_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

INK = "#000000"
"""Colour of emphasis; dark pages replace it with a light colour."""
WARNING = "#DB3A4A"
"""Colour of out-of-memory trials and of limits; visible on light and dark backgrounds."""
NEUTRAL = "#8A8A8A"
"""Colour of guide lines."""

_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9B6BC9", "#A9745B", "#6F9A77", "#A0A000",
)  # fmt: skip
"""The first six colours are from Okabe and Ito (2008), distinct for colour-blind readers."""
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "hexagon")

OUTCOME_COLOURS: Mapping[Outcome, str] = {
    Outcome.MEASURED: "#009E73",
    Outcome.PRUNED: "#56B4E9",
    Outcome.OUT_OF_MEMORY: WARNING,
    Outcome.HOST_OUT_OF_MEMORY: "#E69F00",
    Outcome.OUT_OF_DATA: "#A0A000",
    Outcome.INVALID_CONFIG: "#9B6BC9",
    Outcome.SCRIPT_ERROR: "#CC79A7",
    Outcome.COMMUNICATION_ERROR: "#A9745B",
    Outcome.STALLED: "#0072B2",
    Outcome.TIMEOUT: "#D55E00",
    Outcome.KILLED: "#7A7A52",
    Outcome.LOST: NEUTRAL,
}

_AXIS_TITLES = {
    "throughput": "throughput (samples/s)",
    "FLOPS_per_gpu": "speed (FLOP/s per {slot})",
    "latency": "time of a step, end to end (ms)",
    "forward": "forward pass (ms)",
    "backward": "backward pass (ms)",
    "step": "optimizer step (ms)",
}


@dataclass(frozen=True)
class Measure:
    """A metric as figures show it."""

    metric: str
    device: str = ""
    """``cuda`` or ``cpu``: selects "GPU" or "rank" in titles and values; empty if unknown."""
    factor: float = 1.0
    """Factor from stored values to the metric: a study that optimises FLOPS is shown in samples/s."""

    @property
    def title(self) -> str:
        """Axis title: the metric's name with its unit."""
        return _AXIS_TITLES.get(self.metric, self.metric).replace("{slot}", self._slot)

    @property
    def unit(self) -> str:
        """Unit of a column of a table."""
        return "samples/s" if self.metric == "throughput" else "FLOP/s" if self.metric == "FLOPS_per_gpu" else "ms"

    @property
    def scale(self) -> float:
        """Factor from stored to shown values: times are stored in seconds and shown in ms."""
        return 1000.0 if self.metric in SMALLER_IS_BETTER else self.factor

    @property
    def ticks(self) -> str | None:
        """Tick format of its axis; None for plotly's default."""
        return "~s" if self.metric == "FLOPS_per_gpu" else None

    def shown(self, value: float) -> str:
        """Return a stored value with its unit; without a unit if the metric is not in ``METRICS``."""
        value *= self.factor
        if self.metric == "FLOPS_per_gpu":
            return f"{flops_in_words(value)}/s per {self._slot}"
        return metric_in_words(self.metric, value) if self.metric in METRICS else count_in_words(float(value))

    @property
    def _slot(self) -> str:
        return slot_name(self.device) if self.device else "rank"


class Palette:
    """A colour and a symbol for each distinct text, in order of first occurrence."""

    def __init__(self, words: Iterable[str]) -> None:
        self._index = {word: index for index, word in enumerate(dict.fromkeys(words))}

    def __getitem__(self, words: str) -> str:
        return _COLOURS[self._index.setdefault(words, len(self._index)) % len(_COLOURS)]

    def symbol(self, words: str) -> str:
        """Return the plotly symbol of a text."""
        return _SYMBOLS[self._index[words] % len(_SYMBOLS)]


def lineage_words(trials: Sequence[FrozenTrial]) -> str:
    """Return the description of a lineage's structure by its trials, which are not empty."""
    for trial in trials:
        if attributes.CONFIG in trial.user_attrs:
            return Structure.of(trial.user_attrs[attributes.CONFIG]).words
    params = trials[0].params
    offloads = {key: params[key] for key in STRUCTURE[1:] if key in params}
    return Structure(stage=params.get(ZERO_STAGE, 0), **offloads).words


def wrapped(words: str, width: int = 22, *, most_lines: int | None = None) -> str:
    """Return text with plotly's line breaks at ``width`` characters, ``most_lines`` of it at most, then an ellipsis."""
    lines = textwrap.wrap(words, width, max_lines=most_lines, placeholder="\u2026")
    return "<br>".join(map(figure_text, lines))


def new_figure() -> go.Figure:
    """Return an empty plotly figure; ``UsageError`` if plotly, which is imported here, is not installed."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise UsageError(f"plotly is not installed: {install_command('plotly>=6')}") from None

    return go.Figure()


def lay_out(figure: go.Figure, *, title: str, x: str, y: str, note: str = "", **layout: Any) -> go.Figure:
    """Set title, axis titles, a subtitle (``note``) and the common look of a figure; return it."""
    figure.update_layout(
        title={"text": f"{title}<br><sub>{note}</sub>" if note else title, "font": {"size": 15}},
        meta={"note": note} if note else None,
        template="none",
        legend={"font": {"size": 11}},
        hovermode="closest",
        margin={"l": 80, "r": 20, "t": 60, "b": 60},
    )
    figure.update_layout(**layout)
    figure.update_xaxes(title={"text": x, "standoff": 12}, automargin=True)
    figure.update_yaxes(title={"text": y}, automargin=True)
    return figure


def empty_figure(why: str, *, title: str, x: str = "", y: str = "") -> go.Figure:
    """Return a figure without data that shows a sentence with the reason."""
    figure = lay_out(new_figure(), title=title, x=x, y=y, meta={"missing": why})
    figure.add_annotation(text=wrapped(why, 60), x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    return figure


def note_of(figure: go.Figure) -> str:
    """Return the subtitle of a figure; empty if it has none."""
    meta = figure.layout.meta
    return str(meta.get("note", "")) if isinstance(meta, dict) else ""


def missing(figure: go.Figure) -> str | None:
    """Return the reason why a figure has no data; None if it has data."""
    meta = figure.layout.meta
    return str(meta["missing"]) if isinstance(meta, dict) and "missing" in meta else None
