"""The report of a study: a single HTML file that works offline.

plotly.js, styles and figures are embedded; a content security policy forbids loading anything. Empty sections are left
out; the end of the page lists the reasons.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna_dsat.escape.html import safe_figure
from optuna_dsat.escape.terminal import one_line
from optuna_dsat.metrics import Interval
from optuna_dsat.outcome import Outcome
from optuna_dsat.report import figures
from optuna_dsat.report.cards import cards_of
from optuna_dsat.report.explain.why import why_of
from optuna_dsat.report.facts import (
    MEANING,
    advice_on,
    cli_command,
    fruitless_in_words,
    outcome_counts,
    ranks_of_a_launch,
    script_command_line,
    versions,
)
from optuna_dsat.report.launch_files import Links
from optuna_dsat.report.memory_table import memory_table
from optuna_dsat.report.template import page_text
from optuna_dsat.report.training import Training
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.command import hidden_command
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.study.command import BEST_CONFIG
from optuna_dsat.study.confirm.measured import configuration_of
from optuna_dsat.study.confirm.words import how_known, verdict_in_words
from optuna_dsat.study.end_reason import BUDGETS, headroom_in_words
from optuna_dsat.study.result import SameBatch, StudyResult
from optuna_dsat.trials import attributes
from optuna_dsat.words import (
    bytes_in_words,
    date_in_words,
    metric_in_words,
    params_in_words,
    range_in_words,
    steps_in_words,
    things_in_words,
    times_in_words,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["Section", "figure_section", "page_values", "render", "sections_of"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A figure of the report with its texts."""

    id: str
    heading: str
    lead: str
    """How to read it."""
    missing: str | None
    """Reason for a missing figure; None with a figure."""
    note: str
    """The figure's subtitle, or an empty text."""
    figure: Mapping[str, Any] | None
    """Data and layout for plotly.js; None without a figure."""


_SECTIONS: tuple[tuple[str, str, str, Callable[[StudyView], go.Figure]], ...] = (
    (
        "finalists", "Finalists",
        "The best few and your config, measured again in rounds, alone and with more steps; circles are values of "
        "the search. What is compared are ratios within rounds, so intervals that overlap may still be told apart.",
        figures.plot_finalists,
    ),
    (
        "micro-batch", "Speed over micro-batch",
        "Curves are the fastest settings of a ZeRO stage as the fitted models predict them, with a 95% band and the "
        "memory edge. Filled points were measured with these settings, open points with others, both in the search; "
        "star and cross in the rounds, if there were any.",
        figures.plot_metric,
    ),
    (
        "progress", "Progress of the search",
        "Every launch of the search in the order in which it ended, with its value of the search. Crosses were stopped "
        "or failed; on the axis, without any speed. The star is what rounds confirmed afterwards.",
        figures.plot_progress,
    ),
    (
        "memory", "Memory, predicted and measured",
        "Each launch at the peak that was predicted when it was proposed, corrected by the launches before it. On the "
        "dashed line the prediction was right; above it the launch needed more.",
        figures.plot_memory,
    ),
)  # fmt: skip
"""Id, heading, lead and figure of each section, in the order of the page."""


def render(view: StudyView, *, links: Links | None = None, training: Training | None = None) -> str:
    """Return the report of a study as the text of an HTML file.

    Raises:
        UsageError: If plotly is not installed.
    """
    values = page_values(view, links=links, training=training or Training(), with_models=True)
    return page_text("report.html", title=f"{view.spec.name}: report of optuna-dsat", **values)


def page_values(view: StudyView, *, links: Links | None, training: Training, with_models: bool) -> dict[str, Any]:
    """Return the variables of the templates that show a study.

    ``with_models`` tells whether to fit the models to all launches, which explain the winner and draw the curves.

    Raises:
        UsageError: If plotly is not installed.
    """
    figures.require_plotly()
    values = _facts(view, links, training)
    tables = {"finalists": values["contenders"] or values["unconfirmed"], "memory": values["memory_rows"]}
    sections = sections_of(view, with_models=with_models)
    shown = [section for section in sections if section.missing is None or tables.get(section.id)]
    return {
        **values,
        "why": why_of(view) if with_models else None,
        "sections": shown,
        "left_out": [section for section in sections if section not in shown],
        "has_rates": any(row["rate"] for row in values["launches"]),
        "has_round_rates": any(row["rate"] for row in values["contenders"]),
        "has_files": any(row["files"] for row in values["launches"]),
        "has_figures": any(section.figure is not None for section in shown),
    }


def sections_of(view: StudyView, *, with_models: bool = True) -> tuple[Section, ...]:
    """Return the figures of a study with their texts, in the order of the page; curves only ``with_models``."""
    sections = []
    for id, heading, lead, plot in _SECTIONS:
        is_plain = plot is figures.plot_metric and not with_models
        figure = figures.metric_figure(figures.history_of(view)) if is_plain else plot(view)
        sections.append(figure_section(id=id, heading=heading, lead=lead, figure=figure))
    return tuple(sections)


def figure_section(*, id: str, heading: str, lead: str, figure: go.Figure) -> Section:
    """Return a figure as a section: its data and layout as plain values, or the reason for missing data."""
    missing, note, drawn = figures.missing(figure), figures.note_of(figure), None
    if missing is None:
        figure.update_layout(title=None, meta=None)
        drawn = safe_figure(json.loads(figure.to_json()))
        drawn["layout"].pop("template", None)
    note = f"{note[0].upper()}{note[1:]}." if note else ""
    return Section(id=id, heading=heading, lead=lead, missing=missing, note=note, figure=drawn)


def _facts(view: StudyView, links: Links | None, training: Training) -> dict[str, Any]:
    """Return the template's variables except figures and styles."""
    result, verdict = view.result, view.verdict
    text = "" if result is None else _config_text(result)
    named = {"metric": view.metric, "device": view.spec.device}
    return {
        "view": view,
        "best": view.best,
        "ended": view.end_reason is not None,
        "how_known": "" if verdict is None else how_known(verdict),
        "told": () if verdict is None else verdict_in_words(verdict, **named),
        "changes": () if result is None else result.changes,
        "advice": [] if result is None else advice_on(result),
        "config": text,
        "same_batch": None if result is None else result.same_batch,
        "same_batch_config": "" if result is None or result.same_batch is None else _config_text(result.same_batch),
        "config_name": BEST_CONFIG,
        "config_link": "data:application/json;base64," + base64.b64encode(text.encode()).decode(),
        "status": _status(view),
        "failure": "" if result is not None else one_line(attributes.commonest_message(view.trials)),
        "cards": list(cards_of(view, training)),
        "contenders": list(_contenders(view)),
        "unconfirmed": list(_unconfirmed(view)),
        "tuned": list(_tuned(view)),
        "outcomes": list(_outcomes(view)),
        "memory_rows": memory_table(view),
        "bytes": bytes_in_words,
        "launches": list(_launches(view, links)),
        "profiles": list(_profiles(view, links)),
        "metric": view.metric,
        "commands": list(_commands(view)),
        "made": time.strftime("%Y-%m-%d %H:%M"),
    }


def _config_text(result: StudyResult | SameBatch) -> str:
    return json.dumps(hidden_data(result.config), indent=2)


def _status(view: StudyView) -> str:
    used, budget = view.launches_used, view.spec.max_trials
    launches = things_in_words(budget, "launch")
    flying = f" {view.running} in flight {'is' if view.running == 1 else 'are'} not drawn." if view.running else ""
    if used == 0 and not view.trials:
        return "Nothing has been launched for this study yet."
    if view.end_reason is not None:
        why = f": {view.end_reason}" if view.end_reason else ""
        left = view.attributes.get(attributes.HEADROOM)
        more = f" {headroom_in_words(left, spent=True)}" if left is not None and view.end_reason in BUDGETS else ""
        return f"The search has ended after {used} of {launches}{why}.{more}"
    if not view.launched:
        return "No launch of this search has ended yet."
    if view.is_fruitless:
        return f"The search has ended after {used} of {launches}, and {fruitless_in_words(view)}."
    if view.best is None:
        return f"{used} of {launches} made, and nothing could be measured so far.{flying}"
    if used >= budget and not view.running and view.spec.confirm and attributes.END_REASON not in view.attributes:
        return (
            f"The search is over after {things_in_words(used, 'launch')}; its finalists are not all measured again yet."
        )
    return f"The search has not ended: {used} of {launches} made.{flying}"


def _tuned(view: StudyView) -> Iterator[tuple[str, str]]:
    spec = view.spec
    yield "Script", script_command_line(view)
    yield "Method", spec.method
    yield "Metric", f"{view.metric}, {'larger' if view.maximize else 'smaller'} is better"
    yield "One launch", f"{ranks_of_a_launch(view)}; steps {spec.start_profile_step} to {spec.end_profile_step} count"
    if view.profiled is not None:
        profile = view.profiled.profile
        yield "Model", f"{params_in_words(profile.params)} parameters"
        yield "Device", f"{profile.device_name or view.profiled.device}, {bytes_in_words(profile.device_memory_bytes)}"
    yield "Begun", date_in_words(view.record.created_at)
    yield "Versions", versions(view)


def _contenders(view: StudyView) -> Iterator[Mapping[str, str]]:
    """Yield the rows of the table of configs measured in rounds, best first."""
    verdict = view.verdict
    if verdict is None or not verdict.is_by_rounds:
        return
    undecided = {one.number for one in verdict.undecided}
    for item in (verdict.measured[contender.number] for contender in verdict.contenders):
        remarks = {
            "your config": item.is_user_config,
            "the result": item.number == verdict.result.number,
            "equal to the result": item.number in verdict.ties,
            "not distinguished from the result": item.number in undecided,
            item.left: bool(item.left),
        }
        yield {
            "number": str(item.number),
            "words": item.words,
            "batch": str(item.train_batch_size),
            "rounds": str(item.rounds),
            "value": metric_in_words(view.metric, item.value, device=view.spec.device),
            "rate": _rate(view, item.metrics),
            "between": _between(item.interval, lambda end: metric_in_words(view.metric, end, device=view.spec.device)),
            "ratio": "" if item.speed_up is None or item.is_user_config else _ratio(item.speed_up),
            "remark": "; ".join(text for text, applies in remarks.items() if applies),
        }


def _rate(view: StudyView, metrics: Mapping[str, float]) -> str:
    """Return the samples/s among metrics; empty if the optimised metric already states them."""
    rate = None if view.metric == "throughput" else metrics.get("throughput")
    return metric_in_words("throughput", rate) if rate else ""


def _between(interval: Interval, words: Callable[[float], str]) -> str:
    """Format the ends of an interval, with a common unit stated once; empty without ends."""
    if interval.low is None or interval.high is None:
        return ""
    return range_in_words(words(interval.low), words(interval.high))


def _ratio(ratio: Interval) -> str:
    between = _between(ratio, times_in_words)
    return f"{times_in_words(ratio.value)} ({between})" if between else times_in_words(ratio.value)


def _unconfirmed(view: StudyView) -> Iterator[tuple[int, str, str]]:
    """Yield the finalists that could not be measured again: number, configuration and reason."""
    by_number = {trial.number: trial for trial in view.trials}
    for row in view.rounds.finalists():
        if row["value"] is None and row["number"] in by_number:
            yield row["number"], configuration_of(by_number[row["number"]]), row["message"]


def _outcomes(view: StudyView) -> Iterator[tuple[str, int, str, str]]:
    """Yield each outcome that occurred: name, count, explanation and advice."""
    for outcome, count in outcome_counts(view):
        what, advice = MEANING[outcome]
        yield outcome.value.replace("_", " "), count, what, advice


def _profiles(view: StudyView, links: Links | None) -> Iterator[Mapping[str, Any]]:
    """Yield the launches that belong to no trial, with links to their files."""
    for row in view.launches:
        if row.trial_number is None:
            files = () if links is None else links.of([row.report.launch_id])
            outcome = row.report.outcome.value.replace("_", " ")
            yield {"name": row.report.launch_id, "outcome": outcome, "files": list(files)}


def _launches(view: StudyView, links: Links | None) -> Iterator[Mapping[str, Any]]:
    for trial in view.launched:
        attrs = trial.user_attrs
        outcome = attrs.get(attributes.OUTCOME, Outcome.LOST)
        value = trial.values[0] if trial.values is not None and outcome == Outcome.MEASURED else None
        again = None if view.verdict is None else view.verdict.in_rounds(trial.number)
        peak = attrs.get(attributes.PEAK_BYTES, 0)
        yield {
            "number": trial.number,
            "words": configuration_of(trial),
            "reason": attrs.get(attributes.REASON, ""),
            "own": attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG,
            "outcome": str(outcome).replace("_", " "),
            "value": "" if value is None else metric_in_words(view.metric, value, device=view.spec.device),
            "again": "" if again is None else metric_in_words(view.metric, again.value, device=view.spec.device),
            "best": view.verdict is not None and trial.number == view.verdict.result.number,
            "rate": _rate(view, attrs.get(attributes.METRICS) or {}) if outcome == Outcome.MEASURED else "",
            "peak": bytes_in_words(peak) if peak > 0 else "",
            "message": steps_in_words(**attributes.step_facts(trial))
            if outcome == Outcome.MEASURED
            else one_line(attrs.get(attributes.MESSAGE, "")),
            "files": [] if links is None else list(links.of(view.launch_ids(trial))),
        }


def _commands(view: StudyView) -> Iterator[tuple[str, str]]:
    """Yield (purpose, command)."""
    ended = view.end_reason is not None
    if view.result is not None and ended:
        yield "Train with the best config", hidden_command(view.result.command)
        if view.result.same_batch is not None:
            yield "Train at your global batch", hidden_command(view.result.same_batch.command)
    if view.is_fruitless or (view.result is not None and ended):
        more = ("--max-trials", 2 * view.spec.max_trials)
        yield "Search on, with more launches", cli_command(view, "resume", *more)
    else:
        yield "Continue the search", cli_command(view, "resume")
    if view.result is not None:
        yield "Write the best config to a file", cli_command(view, "best", "-o", BEST_CONFIG)
    yield "All trials as a table", cli_command(view, "export", "--format", "csv")
    yield "Make this report again", cli_command(view, "report")
