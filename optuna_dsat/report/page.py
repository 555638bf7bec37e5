"""The report of a study: a single HTML file that works offline.

plotly.js, styles and figures are embedded; a content security policy forbids loading anything. Empty sections are left
out; the end of the page lists the reasons.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from optuna_dsat.escape.html import safe_figure
from optuna_dsat.escape.terminal import one_line
from optuna_dsat.metrics import Interval
from optuna_dsat.outcome import Outcome
from optuna_dsat.report import figures
from optuna_dsat.report.cards import answers_of, cards_of
from optuna_dsat.report.explain.why import why_of
from optuna_dsat.report.facts import (
    MEANING,
    Training,
    advice_on,
    fruitless_in_words,
    memory_table,
    next_steps,
    outcome_counts,
    tuned,
)
from optuna_dsat.report.launch_files import Links
from optuna_dsat.report.template import page_text
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.references import hidden_command
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.study.command import BEST_CONFIG, SAME_BATCH_CONFIG
from optuna_dsat.study.confirm.measured import configuration_of
from optuna_dsat.study.confirm.words import remarks_in_words
from optuna_dsat.study.end_reason import BUDGETS, headroom_in_words
from optuna_dsat.study.result import SameBatch, StudyResult
from optuna_dsat.trials import attributes
from optuna_dsat.words import (
    bytes_in_words,
    count_in_words,
    steps_in_words,
    things_in_words,
    times_in_words,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go


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
        "micro-batch", "Speed over micro-batch",
        "A curve is the fitted models' prediction for the fastest settings of a ZeRO stage, with a 95% band and the "
        "memory edge. Filled points were measured with these settings, open points with others. Star and cross are "
        "from the rounds, if there were any.",
        figures.plot_metric,
    ),
    (
        "finalists", "Finalists",
        "The best few and your config, measured again in rounds, alone and with more steps; circles are values of "
        "the search. Ratios within rounds are compared, so configs may differ although their intervals overlap.",
        figures.plot_finalists,
    ),
    (
        "progress", "Progress of the search",
        "Trials of the search, in the order in which they ended. Crosses were stopped or failed; those on the axis "
        "have no speed. The star is the value from the rounds.",
        figures.plot_progress,
    ),
    (
        "memory", "Memory, predicted and measured",
        "The peak of each trial, as predicted when it was proposed and as measured. On the dashed line the prediction "
        "was right; above it the trial needed more.",
        figures.plot_memory,
    ),
)  # fmt: skip
"""Id, heading, lead and figure of each section, in the order of the page."""


def render(view: StudyView, *, links: Links | None = None, training: Training | None = None) -> str:
    """Return the report of a study as the text of an HTML file."""
    values = page_values(view, links=links, training=training or Training())
    return page_text("report.html", title=f"{view.spec.name}: report of optuna-dsat", **values)


def page_values(view: StudyView, *, links: Links | None, training: Training) -> dict[str, Any]:
    """Return the variables of the templates that show a study."""
    values = _facts(view, links, training)
    tables = {"finalists": values["contenders"] or values["unconfirmed"], "memory": values["memory_rows"]}
    sections = sections_of(view)
    shown = [section for section in sections if section.missing is None or tables.get(section.id)]
    return {
        **values,
        "why": why_of(view),
        "sections": shown,
        "left_out": [section for section in sections if section not in shown],
        "has_figures": any(section.figure is not None for section in shown),
    }


def sections_of(view: StudyView) -> tuple[Section, ...]:
    """Return the figures of a study with their texts, in the order of the page."""
    return tuple(
        figure_section(id=id, heading=heading, lead=lead, figure=plot(view)) for id, heading, lead, plot in _SECTIONS
    )


def figure_section(*, id: str, heading: str, lead: str, figure: go.Figure) -> Section:
    """Return a figure as a section: its data and layout as plain values, or the reason for missing data."""
    missing, note, drawn = figures.missing(figure), figures.note_of(figure), None
    if missing is None:
        figure.update_layout(title=None, meta=None)
        drawn = safe_figure(json.loads(figure.to_json(), parse_float=_rounded))
        drawn["layout"].pop("template", None)
        drawn["lines"] = _indexed_hover(drawn["data"])
    note = f"{note[0].upper()}{note[1:]}." if note else ""
    return Section(id=id, heading=heading, lead=lead, missing=missing, note=note, figure=drawn)


def _rounded(number: str) -> float:
    """Return a coordinate to a ten-thousandth, which no screen shows: pages grow with the digits of every trial."""
    return float(f"{float(number):.5g}")


def _indexed_hover(traces: Sequence[dict[str, Any]]) -> list[str]:
    """Replace the lines of all hover texts by indices into the returned list: trials have most lines in common."""
    lines: dict[str, int] = {}
    for trace in traces:
        if "hovertext" in trace:
            trace["hovertext"] = [
                [lines.setdefault(line, len(lines)) for line in text.split("<br>")] for text in trace["hovertext"]
            ]
    return list(lines)


def _facts(view: StudyView, links: Links | None, training: Training) -> dict[str, Any]:
    """Return the template's variables except figures and styles."""
    result, verdict = view.result, view.verdict
    rows = list(_launches(view, links))
    return {
        "view": view,
        "ended": view.end_reason is not None,
        "answers": answers_of(view),
        "remarks": () if verdict is None else remarks_in_words(verdict),
        "advice": [] if result is None else advice_on(result),
        "configs": list(_configs(view)),
        "status": _status(view),
        "failure": "" if result is not None else one_line(attributes.commonest_message(view.trials)),
        "cards": list(cards_of(view, training)),
        "unit": _measure(view).unit,
        "contenders": list(_contenders(view)),
        "unconfirmed": list(_unconfirmed(view)),
        "tuned": list(tuned(view)),
        "outcomes": list(_outcomes(view)),
        "memory_rows": memory_table(view),
        "bytes": bytes_in_words,
        "launches": rows,
        "columns": _columns(rows),
        "profiles": list(_profiles(view, links)),
        "commands": list(next_steps(view)),
        "made": time.strftime("%Y-%m-%d %H:%M"),
    }


def _configs(view: StudyView) -> Iterator[Mapping[str, Any]]:
    """Yield the configs to train with, the answer at the user's global batch first, each as a diff to the user's."""
    result = view.result
    if result is None:
        return
    user = None if view.baseline is None else hidden_data(view.ready_config(view.baseline.trial))
    same = result.same_batch
    if same is not None and not same.is_user_config:
        yield _config("same-batch-config", SAME_BATCH_CONFIG, "At your global batch", same, user)
    heading = "" if same is None else "At another global batch" if not same.is_user_config else "The result"
    yield _config("best-config", BEST_CONFIG, heading, result, user)


def _config(id: str, name: str, heading: str, of: StudyResult | SameBatch, user: Any) -> Mapping[str, Any]:
    config = hidden_data(of.config)
    link = base64.b64encode(json.dumps(config, indent=2).encode()).decode()
    return {
        "id": id,
        "name": name,
        "heading": f"{heading}, trial {of.trial}" if heading else "",
        "lines": list(diff_lines(config if user is None else user, config)),
        "link": f"data:application/json;base64,{link}",
        "command": hidden_command(of.command),
    }


def diff_lines(user: Mapping[str, Any], best: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of two configs as JSON, as (``del``, ``ins`` or an empty text, line)."""
    before, after = (json.dumps(config, indent=2).splitlines() for config in (_ordered(user, best), best))
    old, new = ([line.rstrip(",") for line in lines] for lines in (before, after))
    for tag, begin, end, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            yield from (("del", line) for line in before[begin:end])
        yield from (("" if tag == "equal" else "ins", line) for line in after[first:last])


def _ordered(config: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its keys in the order of another."""
    names = [name for name in like if name in config] + [name for name in config if name not in like]
    nested = {name for name in names if isinstance(config[name], Mapping) and isinstance(like.get(name), Mapping)}
    return {name: _ordered(config[name], like[name]) if name in nested else config[name] for name in names}


def _status(view: StudyView) -> str:
    used, budget = view.trials_done, view.spec.max_trials
    trials = things_in_words(budget, "trial")
    flying = f" {view.running} running {'is' if view.running == 1 else 'are'} not drawn." if view.running else ""
    if used == 0 and not view.trials:
        return "Nothing has been launched for this study yet."
    if view.end_reason is not None:
        why = f": {view.end_reason}" if view.end_reason else ""
        left = view.attributes.get(attributes.HEADROOM)
        more = f" {headroom_in_words(left)}" if left is not None and view.end_reason in BUDGETS else ""
        return f"The search has ended after {used} of {trials}{why}.{more}"
    if not view.launched:
        return "No trial of this search has ended yet."
    if view.is_fruitless:
        return f"The search has ended after {used} of {trials}, and {fruitless_in_words(view)}."
    if view.best is None:
        return f"{used} of {trials} done, and nothing could be measured so far.{flying}"
    if used >= budget and not view.running and view.spec.confirm and attributes.END_REASON not in view.attributes:
        return f"The search is over after {things_in_words(used, 'trial')}; not all finalists are measured again yet."
    return f"The search has not ended: {used} of {trials} done.{flying}"


def _measure(view: StudyView) -> figures.Measure:
    return figures.measure_of(figures.history_of(view))


def _contenders(view: StudyView) -> Iterator[Mapping[str, str]]:
    """Yield the rows of the table of configs measured in rounds, best first."""
    verdict = view.verdict
    if verdict is None or not verdict.is_by_rounds:
        return
    undecided, scale = {measured.number for measured in verdict.undecided}, _measure(view).scale
    for item in (verdict.measured[contender.number] for contender in verdict.contenders):
        remarks = {
            "your config": item.is_user_config,
            "the result": item.number == verdict.result.number,
            "equal to the result": item.number in verdict.ties,
            "undecided by the rounds": item.number in undecided,
            item.left: bool(item.left),
        }
        ratio = None if item.is_user_config else item.speed_up
        yield {
            "number": str(item.number),
            "words": item.words,
            "batch": count_in_words(item.train_batch_size),
            "rounds": str(item.rounds),
            "value": count_in_words(scale * item.value),
            "between": _between(item.interval, lambda end: count_in_words(scale * end)),
            "ratio": "" if ratio is None else times_in_words(ratio.value),
            "ratio_between": "" if ratio is None else _between(ratio, times_in_words),
            "remark": "; ".join(text for text, applies in remarks.items() if applies),
        }


def _between(interval: Interval, words: Callable[[float], str]) -> str:
    """Format the ends of an interval; empty without ends."""
    if interval.low is None or interval.high is None:
        return ""
    return f"{words(interval.low)} to {words(interval.high)}"


def _unconfirmed(view: StudyView) -> Iterator[tuple[int, str, str]]:
    """Yield the finalists that could not be measured again: number, configuration and reason."""
    by_number = {trial.number: trial for trial in view.trials}
    for row in view.rounds.finalists():
        if row["value"] is None and row["number"] in by_number:
            yield row["number"], configuration_of(by_number[row["number"]]), row["message"]


def _outcomes(view: StudyView) -> Iterator[tuple[str, int, str, str]]:
    """Yield each outcome that occurred and has advice: name, count, explanation and advice."""
    for outcome, count in outcome_counts(view):
        what, advice = MEANING[outcome]
        if advice:
            yield outcome.value.replace("_", " "), count, what, advice


def _profiles(view: StudyView, links: Links | None) -> Iterator[Mapping[str, Any]]:
    """Yield the launches that belong to no trial, with links to their files."""
    for row in view.launches:
        if row.trial_number is None:
            files = () if links is None else links.of([row.report.launch_id])
            outcome = row.report.outcome.value.replace("_", " ")
            yield {"name": row.report.launch_id, "outcome": outcome, "files": list(files)}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number of a table."""

    text: str
    """By which rows are sorted, too: without a unit."""
    share: float = 0.0
    """Length of its bar, in percent of the cell; 0 for none."""


def _launches(view: StudyView, links: Links | None) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of the table of trials; numbers are a ``Cell``, or None if unknown."""
    scale = _measure(view).scale
    most = max((scale * trial.values[0] for trial in view.measured), default=0.0)
    device = 0 if view.profiled is None else view.profiled.profile.device_memory_bytes

    def speed(value: float | None, *, bar: bool = False) -> Cell | None:
        if value is None:
            return None
        number = scale * value
        return Cell(text=count_in_words(number), share=100 * number / most if bar and most else 0.0)

    def memory(count: int | None, *, bar: bool = False) -> Cell | None:
        share = 100 * (count or 0) / device if bar and device else 0.0
        return Cell(text=f"{count / 2**30:.3g}", share=min(100.0, share)) if count else None

    for trial in view.launched:
        attrs = trial.user_attrs
        outcome = attrs.get(attributes.OUTCOME, Outcome.LOST)
        is_measured = outcome == Outcome.MEASURED
        measured = None if view.verdict is None else view.verdict.measured.get(trial.number)
        ratio = None if measured is None or measured.is_user_config else measured.speed_up
        yield {
            "number": trial.number,
            "words": configuration_of(trial),
            "reason": attrs.get(attributes.REASON, ""),
            "own": attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG,
            "best": view.verdict is not None and trial.number == view.verdict.result.number,
            "outcome": str(outcome).replace("_", " "),
            "predicted": speed(attrs.get(attributes.PREDICTED_VALUE)),
            "value": speed(trial.values[0], bar=True) if trial.values is not None and is_measured else None,
            "again": speed(measured.value) if measured is not None and measured.rounds else None,
            "ratio": None if ratio is None else Cell(text=times_in_words(ratio.value)),
            "predicted_peak": memory(attrs.get(attributes.PREDICTED_PEAK_BYTES)),
            "peak": memory(attrs.get(attributes.PEAK_BYTES), bar=True),
            "message": steps_in_words(**attributes.step_facts(trial))
            if is_measured
            else one_line(attrs.get(attributes.MESSAGE, "")),
            "files": [] if links is None else list(links.of(view.launch_ids(trial))),
        }


def _columns(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the optional columns of the table of trials that contain information."""
    names = {name for name in ("reason", "predicted", "again", "ratio", "files") if any(row[name] for row in rows)}
    return names | {"outcome" for row in rows if row["message"] or row["outcome"] != Outcome.MEASURED}
