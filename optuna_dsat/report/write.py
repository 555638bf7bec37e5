"""Write a study's report, or several studies side by side, to a file.

Studies side by side were not measured in common rounds, so ratios between them have no interval.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.errors import UsageError
from optuna_dsat.metrics import shares_of_linear, speed_up
from optuna_dsat.report import figures
from optuna_dsat.report.cards import search_seconds
from optuna_dsat.report.facts import (
    Training,
    fruitless_in_words,
    script_command_line,
    training_times,
    tuned,
)
from optuna_dsat.report.launch_files import Links
from optuna_dsat.report.page import figure_section, render
from optuna_dsat.report.template import page_text
from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.runtime.files import write_output
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.store import Store
from optuna_dsat.study.config_changes import shown_settings
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.confirm.words import how_known, ratio_in_words
from optuna_dsat.trials import attributes
from optuna_dsat.words import (
    bytes_in_words,
    duration_in_words,
    metric_in_words,
    slot_name,
    slot_time_in_words,
    times_in_words,
)

COMPARISON = "comparison.html"
"""Default name of a comparison, in the working directory."""


def default_path(view: StudyView) -> Path:
    """Return the default path: among the study's files if they are on this machine, else in the working directory."""
    return Path(f"{view.spec.name}-report.html") if view.folder is None else view.folder / "report.html"


def is_report(text: str) -> bool:
    """Return whether a file contains a report or a comparison."""
    return '<meta name="generator" content="optuna-dsat ' in text


def write_report(store: Store, name: str, path: Path | None = None, *, training: Training | None = None) -> Path:
    """Write the report of a study's current state, in place of an existing file; return the file.

    Raises:
        UsageError: If the study does not exist, or the file cannot be written.
        StorageError: If the database fails for longer than the store's retry limit.
    """
    view = read_view(store, name)
    target = default_path(view) if path is None else path
    return _write(target, render(view, links=Links(view=view, page=target.parent), training=training))


def write_comparison(views: Sequence[StudyView], path: Path | None = None, *, training: Training | None = None) -> Path:
    """Write two or more studies side by side, in place of an existing file; ``UsageError`` if it cannot be written."""
    return _write(Path(COMPARISON) if path is None else path, render_comparison(views, training=training))


def _write(target: Path, text: str) -> Path:
    try:
        write_output(target, text)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}. Choose another file with -o.") from None
    return target


_CAVEAT = (
    "These studies were not measured in common rounds: a ratio between two of them is valid only if nothing else "
    "differed, and has no interval. Models, machines and versions are below."
)
_ALIKE = 1.1
"""Ratio of speeds of the users' configs up to which conditions count as equal."""


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


def render_comparison(views: Sequence[StudyView], *, training: Training | None = None) -> str:
    """Return several studies side by side as HTML."""
    names = _names(views)
    sections = [
        figure_section(
            id="results",
            heading="Speed",
            lead="Samples per second over all devices.",
            figure=figures.comparison_figure(
                names, best=[_rate(view.best) for view in views], baseline=[_rate(view.baseline) for view in views]
            ),
        ),
        figure_section(
            id="course",
            heading="Progress",
            lead="The best of the search so far, over the time since each study's first launch.",
            figure=figures.course_figure(names, [list(_course(view)) for view in views]),
        ),
    ]
    sections = [section for section in sections if section.figure is not None]
    return page_text(
        "compare.html",
        title=f"{' and '.join(names[:3])}{' and more' if len(names) > 3 else ''}: side by side",
        has_figures=bool(sections),
        names=names,
        caveat=caveat(_own_rates(views)),
        result_rows=rows_of(views, training=training),
        tuned_rows=_tuned_rows(views),
        setting_rows=setting_rows(views),
        sections=sections,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )


def caveat(own_rates: Sequence[float]) -> str:
    """Return the limits of a comparison, with the ratio of the users' configs if their speeds differ."""
    if not own_rates or max(own_rates) <= _ALIKE * min(own_rates):
        return _CAVEAT
    ratio = times_in_words(max(own_rates) / min(own_rates))
    return (
        f"{_CAVEAT} Your config is {ratio}x as fast in one study as in another: unless scripts or machines differ, "
        "conditions did, so compare speed-ups, not speeds."
    )


def _own_rates(views: Sequence[StudyView]) -> list[float]:
    """Return the measured speeds of the users' configs; empty if numbers of devices differ."""
    if len({view.spec.slots_per_trial for view in views}) > 1:
        return []
    return [rate for view in views if (rate := _rate(view.baseline))]


def _rate(config: Measured | None) -> float | None:
    """Return a configuration's samples/s; None for none, or one that was not measured."""
    return None if config is None else config.samples_per_s


def _names(views: Sequence[StudyView]) -> list[str]:
    """Return the studies' names, with their databases if a name is not unique."""
    names = [view.spec.name for view in views]
    return [
        name if names.count(name) == 1 else f"{name} ({view.storage_url})"
        for name, view in zip(names, views, strict=True)
    ]


def _is_sweep(views: Sequence[StudyView]) -> bool:
    """Whether the studies search the same script at different numbers of devices of the same kind."""
    counts = {view.spec.slots_per_trial for view in views}
    kinds = {view.spec.device for view in views}
    names = {view.profiled.profile.device_name for view in views if view.profiled is not None}
    scripts = {script_command_line(view) for view in views}
    return len(counts) == len(views) and len(kinds) == len(scripts) == 1 and len(names) <= 1


def _course(view: StudyView) -> Iterator[tuple[float, float]]:
    """Yield (seconds since the first launch, best samples/s so far) at each improvement and at the last launch."""
    if not view.launches:
        return
    rates = {
        trial.number: (trial.user_attrs.get(attributes.METRICS) or {}).get("throughput") for trial in view.measured
    }
    began, best = min(row.report.started_at for row in view.launches), 0.0
    ends = {  # of the last attempt at each trial
        row.trial_number: row.report.started_at + row.report.held_s
        for row in view.launches
        if row.purpose == "trial" and row.trial_number is not None
    }
    for place, (number, end) in enumerate(sorted(ends.items(), key=lambda item: item[1]), start=1):
        rate = rates.get(number) or 0.0
        if rate > best or (best > 0 and place == len(ends)):
            best = max(best, rate)
            yield end - began, best


def rows_of(views: Sequence[StudyView], *, training: Training | None = None) -> list[Row]:
    """Return the facts of the studies' results, except facts unknown for all; speeds also relative to the first's."""
    rates = [_rate(view.best) for view in views]
    ratios = [speed_up(rate, rates[0], maximize=True) for rate in rates]
    if not any(ratios[1:]):
        ratios = [None] * len(views)
    shares = _efficiencies(views) if _is_sweep(views) else [""] * len(views)
    kinds = {slot_name(view.spec.device) for view in views}
    each = f"speed per {kinds.pop() if len(kinds) == 1 else 'rank'}"
    return _rows(
        [
            _result(view, training or Training(), ratio=ratio, share=share, each=each)
            for view, ratio, share in zip(views, ratios, shares, strict=True)
        ]
    )


def _result(view: StudyView, training: Training, *, ratio: float | None, share: str, each: str) -> dict[str, str]:
    """Return the facts of a study's result; unknown facts are empty."""
    best = view.best
    rate, user_rate = _rate(best), _rate(view.baseline)
    tokens = None if best is None else best.metrics.get("tokens_per_s")
    step_s = None if best is None else best.step_s
    utilisation = None if best is None else view.utilisation(best)
    epochs = "an epoch" if training.epochs == 1 else f"{training.epochs:g} epochs"
    return {
        "configuration": "" if best is None else best.words,
        "speed": metric_in_words("throughput", rate) if rate else "",
        "times the first": "" if ratio is None else f"{times_in_words(ratio)}\u00d7",
        each: metric_in_words("throughput", rate / view.spec.slots_per_trial) if rate else "",
        "scaling": share,
        "tokens": metric_in_words("tokens_per_s", tokens) if tokens else "",
        "one step": metric_in_words("latency", step_s) if step_s else "",
        "global batch": "" if best is None else str(best.train_batch_size),
        "peak memory": bytes_in_words(best.peak_bytes) if best is not None and best.peak_bytes else "",
        "MFU": "" if utilisation is None else f"{utilisation:.1%}",
        "your config": metric_in_words("throughput", user_rate) if user_rate else "",
        "speed-up over it": _speed_up_words(best),
        "how it is known": "" if view.verdict is None else how_known(view.verdict),
        epochs: _training_words(view, training),
    }


def _training_words(view: StudyView, training: Training) -> str:
    times = training_times(view, training)
    if times is None:
        return ""
    takes, hours = duration_in_words(times.best_s), times.saved_slot_hours
    if not hours:  # the result is the user's own config, or that was not measured
        return takes if times.price is None else f"{takes} ({times.price:,.2f})"
    saved = f"{slot_time_in_words(abs(hours) * 3600, view.spec.device)} {'saved' if hours > 0 else 'more'}"
    price = "" if times.saved_price is None else f", {abs(times.saved_price):,.2f}"
    return f"{takes} ({saved}{price})"


def _speed_up_words(best: Measured | None) -> str:
    if best is None or best.is_user_config or best.speed_up is None:
        return "none" if best is not None and best.is_user_config else ""
    return ratio_in_words(best.speed_up)


def _efficiencies(views: Sequence[StudyView]) -> list[str]:
    """Return the share of linear scaling at each study's number of devices; empty if nothing was measured."""
    ordered = sorted(views, key=lambda view: view.spec.slots_per_trial)
    rates = [_rate(view.best) for view in ordered]
    counts = [view.spec.slots_per_trial for view in ordered]
    each = [None if rate is None else rate / count for rate, count in zip(rates, counts, strict=True)]
    shares = dict(zip(counts, shares_of_linear(each), strict=True))
    result = (shares[view.spec.slots_per_trial] for view in views)
    return ["" if share is None else f"{share:.0%}" for share in result]


def _tuned_rows(views: Sequence[StudyView]) -> list[Row]:
    libraries = sorted({name for view in views for name in view.record.versions})
    versions = [{name: str(view.record.versions.get(name, "")) for name in libraries} for view in views]
    return _rows([_tuned(view) | version for view, version in zip(views, versions, strict=True)])


def _tuned(view: StudyView) -> dict[str, str]:
    """Return the facts of a study's own report on its script and machine, and its progress; unknown facts are empty."""
    facts = {"Script": "", "Model": "", "Device": "", **dict(tuned(view))}
    del facts["Versions"]
    ended = "no" if view.end_reason is None else view.end_reason or "yes"
    return {
        **{name.lower(): text for name, text in facts.items()},
        "trials": f"{view.trials_done} of {view.spec.max_trials}",
        "time of the search": duration_in_words(search_seconds(view.launches)),
        "ended": fruitless_in_words(view) if view.is_fruitless else ended,
        "database": view.storage_url,
    }


def _rows(facts: Sequence[Mapping[str, str]]) -> list[Row]:
    """Return a row for each fact that is known for any study; all studies have the same facts."""
    rows = [Row(name=name, cells=tuple(of_study[name] for of_study in facts)) for name in facts[0]]
    return [row for row in rows if any(row.cells)]


def setting_rows(views: Sequence[StudyView]) -> list[Row]:
    """Return the settings in which the best configs differ, by dotted keys; a missing setting is empty."""
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
