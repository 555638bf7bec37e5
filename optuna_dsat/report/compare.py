"""Several studies side by side on a page: models, machines, methods, before and after an upgrade.

Their launches were not measured in common rounds, so ratios between studies are plain ratios, without an interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.errors import UsageError
from optuna_dsat.metrics import shares_of_linear, speed_up
from optuna_dsat.report import figures
from optuna_dsat.report.facts import created, fruitless_in_words, ranks_of_a_launch, script_command_line
from optuna_dsat.report.figures import AtCount, ComparedStudy
from optuna_dsat.report.page import Section, figure_section
from optuna_dsat.report.slot_time import account
from optuna_dsat.report.template import page_text
from optuna_dsat.report.training import Training, training_times
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.study.config_changes import shown_settings
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.confirm.words import how_known
from optuna_dsat.trials import attributes
from optuna_dsat.words import (
    bytes_in_words,
    duration_in_words,
    metric_in_words,
    params_in_words,
    slot_name,
    slot_time_in_words,
    times_in_words,
)

__all__ = ["Row", "render_comparison", "rows_of", "setting_rows"]

_TOO_FEW = "A comparison takes at least two studies."
_CAVEAT = (
    "These studies were not measured in common rounds: a ratio between two of them holds if nothing else differed, and "
    "has no interval. What was tuned, on what, and with which versions stands below."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fact of all studies."""

    name: str
    cells: tuple[str, ...]
    """Values by study; empty if unknown."""

    @property
    def differs(self) -> bool:
        """Whether the studies differ in this fact."""
        return len(set(self.cells)) > 1


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A study with its result."""

    view: StudyView
    best: Measured | None
    training: Training


def render_comparison(views: Sequence[StudyView], *, training: Training | None = None) -> str:
    """Return several studies side by side as the text of an HTML file.

    Raises:
        UsageError: If there are fewer than two studies, or plotly is not installed.
    """
    if len(views) < 2:
        raise UsageError(_TOO_FEW)
    figures.require_plotly()
    names = _names(views)
    shown = [_figures_of(name, view) for name, view in zip(names, views, strict=True)]
    sections = [
        figure_section(
            id="results",
            heading="Speed",
            lead="Samples per second over all devices.",
            figure=figures.comparison_figure(shown),
        ),
        *_scaling(views),
        figure_section(
            id="course",
            heading="How they came to them",
            lead="The best of the search so far, over the time since each study's first launch.",
            figure=figures.course_figure(shown),
        ),
    ]
    sections = [section for section in sections if section.figure is not None]
    return page_text(
        "compare.html",
        title=f"{' and '.join(names[:3])}{' and more' if len(names) > 3 else ''}: side by side",
        has_figures=bool(sections),
        names=names,
        caveat=_CAVEAT,
        result_rows=rows_of(views, training=training),
        tuned_rows=_tuned_rows(views),
        setting_rows=setting_rows(views),
        sections=sections,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )


def _names(views: Sequence[StudyView]) -> list[str]:
    """Return the studies' names, with their databases if a name is not unique."""
    names = [view.spec.name for view in views]
    return [
        name if names.count(name) == 1 else f"{name} ({view.storage_url})"
        for name, view in zip(names, views, strict=True)
    ]


def _figures_of(name: str, view: StudyView) -> ComparedStudy:
    return ComparedStudy(
        name=name,
        best=None if view.best is None else view.best.samples_per_s,
        own=None if view.baseline is None else view.baseline.samples_per_s,
        course=tuple(_course(view)),
    )


def _scaling(views: Sequence[StudyView]) -> Iterator[Section]:
    """Yield the samples/s by number of devices per launch, if the studies are a sweep over this number."""
    if not _is_sweep(views):
        return
    device = views[0].spec.device
    unit = slot_name(device)
    yield figure_section(
        id="scaling",
        heading=f"How many {unit}s are worth it",
        lead=f"What one {unit} does at each number of them. 100% is what it does at the least number; more than that "
        "is no mistake where a larger number allows a faster configuration.",
        figure=figures.scaling_figure(sorted(map(_at_count, views), key=lambda row: row.devices), device=device),
    )


def _is_sweep(views: Sequence[StudyView]) -> bool:
    """Whether the studies search the same script at different numbers of devices of the same kind."""
    counts = {view.spec.slots_per_trial for view in views}
    kinds = {view.spec.device for view in views}
    names = {view.profiled.profile.device_name for view in views if view.profiled is not None}
    scripts = {script_command_line(view) for view in views}
    return len(counts) == len(views) and len(kinds) == len(scripts) == 1 and len(names) <= 1


def _at_count(view: StudyView) -> AtCount:
    rate = None if view.best is None else view.best.samples_per_s
    return AtCount(devices=view.spec.slots_per_trial, samples_per_s=rate)


def _course(view: StudyView) -> Iterator[tuple[float, float]]:
    """Yield (seconds since the first launch, best samples/s so far) at each improvement and at the last launch."""
    if not view.launches:
        return
    rates = {
        trial.number: (trial.user_attrs.get(attributes.METRICS) or {}).get("throughput") for trial in view.measured
    }
    began, best = min(row.report.started_at for row in view.launches), 0.0
    ends = [
        (row.report.started_at + row.report.held_s, rates.get(row.trial_number))
        for row in view.launches
        if row.purpose == "trial" and row.trial_number is not None
    ]
    ends.sort(key=lambda item: item[0])
    for place, (end, rate) in enumerate(ends, start=1):
        if (rate or 0.0) > best or (best > 0 and place == len(ends)):
            best = max(best, rate or 0.0)
            yield end - began, best


_Fact = tuple[str, Callable[[_Compared], str]]
"""Name of a fact, and the function that reads it from a study; returns an empty text if unknown."""


def _rate(found: Measured | None) -> str:
    return "" if found is None or not found.samples_per_s else metric_in_words("throughput", found.samples_per_s)


def _training_words(study: _Compared) -> str:
    times = training_times(study.view, study.training)
    if times is None:
        return ""
    takes, hours = duration_in_words(times.best_s), times.saved_slot_hours
    if not hours:  # the result is the user's own config
        return takes if times.price is None else f"{takes} ({times.price:,.2f})"
    saved = f"{slot_time_in_words(abs(hours) * 3600, study.view.spec.device)} {'saved' if hours > 0 else 'more'}"
    price = "" if times.saved_price is None else f", {abs(times.saved_price):,.2f}"
    return f"{takes} ({saved}{price})"


def _speed_up_words(study: _Compared) -> str:
    if study.best is None or study.best.is_user_config or study.best.speed_up is None:
        return "none" if study.best is not None and study.best.is_user_config else ""
    ratio = study.best.speed_up
    if ratio.low is None or ratio.high is None:
        return f"{times_in_words(ratio.value)}\u00d7 (by the search)"
    return f"{times_in_words(ratio.value)}\u00d7 ({times_in_words(ratio.low)} to {times_in_words(ratio.high)})"


def _end_words(view: StudyView) -> str:
    if view.is_fruitless:
        return fruitless_in_words(view)
    return "no" if view.end_reason is None else view.end_reason or "yes"


def _per_slot(study: _Compared) -> str:
    if study.best is None or not study.best.samples_per_s:
        return ""
    return metric_in_words("throughput", study.best.samples_per_s / study.view.spec.slots_per_trial)


_EACH = "speed per device"
"""The row whose name includes the kind of device."""
_RESULT: tuple[_Fact, ...] = (
    ("configuration", lambda study: "" if study.best is None else study.best.words),
    ("speed", lambda study: _rate(study.best)),
    (_EACH, _per_slot),
    (
        "tokens",
        lambda study: (
            ""
            if study.best is None or not study.best.metrics.get("tokens_per_s")
            else metric_in_words("tokens_per_s", study.best.metrics["tokens_per_s"])
        ),
    ),
    (
        "one step",
        lambda study: (
            "" if study.best is None or not study.best.step_s else metric_in_words("latency", study.best.step_s)
        ),
    ),
    ("global batch", lambda study: "" if study.best is None else str(study.best.train_batch_size)),
    (
        "peak memory",
        lambda study: bytes_in_words(study.best.peak_bytes) if study.best and study.best.peak_bytes else "",
    ),
    ("MFU", lambda row: f"{share:.1%}" if row.best and (share := row.view.utilisation(row.best)) is not None else ""),
    ("your own config", lambda row: _rate(row.view.baseline)),
    ("speed-up over it", _speed_up_words),
    ("how it is known", lambda row: "" if row.view.verdict is None else how_known(row.view.verdict)),
)
_TUNED: tuple[_Fact, ...] = (
    ("script", lambda study: script_command_line(study.view)),
    (
        "model",
        lambda study: (
            "" if study.view.profiled is None else f"{params_in_words(study.view.profiled.profile.params)} parameters"
        ),
    ),
    (
        "device",
        lambda study: (
            ""
            if study.view.profiled is None
            else f"{study.view.profiled.profile.device_name or study.view.profiled.device}, "
            f"{bytes_in_words(study.view.profiled.profile.device_memory_bytes)}"
        ),
    ),
    ("one launch", lambda study: ranks_of_a_launch(study.view)),
    ("method", lambda study: study.view.spec.method),
    ("metric", lambda study: study.view.metric),
    ("launches", lambda study: f"{study.view.launches_used} of {study.view.spec.max_trials}"),
    ("time of the search", lambda study: duration_in_words(account(study.view.launches).wall_s)),
    ("ended", lambda study: _end_words(study.view)),
    ("begun", lambda study: created(study.view)),
    ("database", lambda study: study.view.storage_url),
)


def rows_of(views: Sequence[StudyView], *, training: Training | None = None) -> list[Row]:
    """Return the facts of the studies' results; facts unknown for all studies are left out.

    Args:
        views: The studies; speeds are also given as multiples of the first study's speed.
        training: The planned training; None for an epoch of each study's data.
    """
    wanted = training or Training()
    compared = _compared(views, wanted)
    epochs = "an epoch" if wanted.epochs == 1 else f"{wanted.epochs:g} epochs"
    rows = _rows((*_RESULT, (epochs, _training_words)), compared)
    rates = [None if study.best is None else study.best.samples_per_s for study in compared]
    ratios = [speed_up(rate, rates[0], maximize=True) for rate in rates]
    cells = tuple("" if ratio is None else f"{times_in_words(ratio)}\u00d7" for ratio in ratios)
    if any(cells[1:]):
        place = 1 + next(index for index, row in enumerate(rows) if row.name == "speed")
        rows.insert(place, Row(name="times the first", cells=cells))
    efficiencies = _efficiencies(views) if _is_sweep(views) else ()
    if any(efficiencies):
        place = 1 + next(index for index, row in enumerate(rows) if row.name == _EACH)
        rows.insert(place, Row(name="scaling", cells=efficiencies))
    kinds = {slot_name(view.spec.device) for view in views}
    each = f"speed per {kinds.pop() if len(kinds) == 1 else 'rank'}"
    return [replace(row, name=each) if row.name == _EACH else row for row in rows]


def _efficiencies(views: Sequence[StudyView]) -> tuple[str, ...]:
    """Return the share of linear scaling at each study's number of devices; empty if nothing was measured."""
    ordered = sorted(map(_at_count, views), key=lambda row: row.devices)
    shares = dict(zip((row.devices for row in ordered), shares_of_linear([row.each for row in ordered]), strict=True))
    result = (shares[view.spec.slots_per_trial] for view in views)
    return tuple("" if share is None else f"{share:.0%}" for share in result)


def _tuned_rows(views: Sequence[StudyView]) -> list[Row]:
    compared = _compared(views, Training())
    libraries = sorted({name for view in views for name in view.record.versions})
    versions: list[_Fact] = [(name, _version_of(name)) for name in libraries]
    return _rows((*_TUNED, *versions), compared)


def _version_of(library: str) -> Callable[[_Compared], str]:
    return lambda study: str(study.view.record.versions.get(library, ""))


def _compared(views: Sequence[StudyView], training: Training) -> list[_Compared]:
    return [
        _Compared(
            view=view,
            best=view.best,
            training=training,
        )
        for view in views
    ]


def _rows(facts: Sequence[_Fact], compared: Sequence[_Compared]) -> list[Row]:
    rows = [Row(name=name, cells=tuple(read(study) for study in compared)) for name, read in facts]
    return [row for row in rows if any(row.cells)]


def setting_rows(views: Sequence[StudyView]) -> list[Row]:
    """Return the settings in which the best configs differ, by their dotted keys; missing settings are empty.

    Studies without a best config are not compared.
    """
    result = [_settings(view) for view in views]
    known = [settings for settings in result if settings]
    keys = sorted({key for settings in known for key in settings})
    differing = [key for key in keys if len({settings.get(key, "") for settings in known}) > 1]
    return [Row(name=key, cells=tuple(item.get(key, "") for item in result)) for key in differing]


def _settings(view: StudyView) -> Mapping[str, str]:
    if view.best is None:
        return {}
    config: dict[str, Any] = hidden_data(ds_config.effective(view.complete_config(view.best.trial)))
    return shown_settings(config)
