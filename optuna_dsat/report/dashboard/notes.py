"""The notes of a study and of its trials, in Markdown: pure functions of a ``StudyView``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from optuna.trial import FrozenTrial

from optuna_dsat.escape.markdown import Markdown, code, fenced, literal, table
from optuna_dsat.escape.shell import folded
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.facts import (
    MEANING,
    advice_on,
    fruitless_in_words,
    next_steps,
    outcome_counts,
    script_command_line,
    slot_seconds,
    tuned,
)
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.references import hidden_command
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.study.confirm.measured import Measured, configuration_of
from optuna_dsat.study.confirm.speeds import speed_of
from optuna_dsat.study.confirm.words import how_known, verdict_in_words
from optuna_dsat.trials import attributes
from optuna_dsat.words import (
    bytes_in_words,
    duration_in_words,
    metric_in_words,
    slot_time_in_words,
    steps_in_words,
    things_in_words,
    times_in_words,
)

OWN_TEXT = "*Written by optuna-dsat, anew at every refresh. What you write below this line is kept.*"
"""Last line of every generated note."""
WHOLE_CHARS = 2**17
"""Maximum length of a config or list of commands in a note; longer texts were not written by this program."""

_LINE_CHARS = 80
"""Maximum length of a command line, in characters."""


def study_note(view: StudyView) -> str:
    """Return the note of a study: best config, tuned settings, outcomes, next commands."""
    parts = [f"# {literal(view.spec.name)}", _progress(view), "## Best", _best(view), "## What was tuned", _tuned(view)]
    parts += ["## Outcomes", _outcomes(view), "## Next steps", _commands(view)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _progress(view: StudyView) -> str:
    running = f", {view.running} running" if view.running else ""
    return (
        f"{view.trials_done} of {things_in_words(view.spec.max_trials, 'trial')} done{running}; "
        f"{slot_time_in_words(slot_seconds(view.launches), view.spec.device)} in all."
    )


def _value(view: StudyView, measured: Measured) -> Markdown:
    speed = view.speed(measured)
    between = speed.between(measured.interval)
    return Markdown(f"**{speed.text}**" + (f" ({between})" if between else ""))


def _best(view: StudyView) -> str:
    best, baseline, verdict = view.best, view.baseline, view.verdict
    if view.is_fruitless:
        return f"The search has ended, and {literal(fruitless_in_words(view))}."
    if best is None or verdict is None:
        return "Nothing has been measured yet."
    ratio = "" if best.speed_up is None else f"{times_in_words(best.speed_up.value)}\u00d7"
    rows = [["best", best.number, best.words, _value(view, best), ratio]]
    if baseline is not None:
        rows.append(["your config", baseline.number, baseline.words, _value(view, baseline), "1\u00d7"])
    lines: list[str] = [table(("", "trial", "configuration", "speed", "speed-up"), rows)]
    if baseline is None:
        lines.append("Your config was not measured, so there is no speed-up to show.")
    lines += map(literal, verdict_in_words(verdict, metric=view.metric, device=view.spec.device))
    if view.end_reason is None:
        lines.append(f"The search has not ended: this is the best so far, {literal(how_known(verdict))}.")
    first = verdict.measured[view.measured[0].number]
    if verdict.is_by_rounds:
        searched = _searched(view, first)
        lines.append(
            f"Plots and tables of optuna-dashboard show values of the search, by few steps each; by these trial "
            f"{first.number} is the best, at {searched}. The result is trial "
            f"{best.number}, as the rounds measured it; `optuna-dsat dashboard --optuna-dashboard` has it in the "
            "card of the best trial, with its value of the search; optuna-dashboard started in another way "
            "has the search's best there."
        )
    if view.result is not None:
        config = json.dumps(hidden_data(view.result.config), indent=2)
        lines += [fenced(config, "json", limit_chars=WHOLE_CHARS), *map(literal, advice_on(view.result))]
    return "\n\n".join(lines)


def _searched(view: StudyView, measured: Measured) -> str:
    """Return the speed of a measured trial in the search."""
    metrics, value = measured.searched_metrics, measured.searched_value
    return speed_of(metrics, value, metric=view.metric, device=view.spec.device).text


def _tuned(view: StudyView) -> str:
    paths = {"Script": code(script_command_line(view)), "Files": code(str(view.spec.study_dir))}
    return table(("", ""), list((dict(tuned(view)) | paths).items()))


def _outcomes(view: StudyView) -> str:
    rows = [(outcome.value, count, MEANING[outcome][0]) for outcome, count in outcome_counts(view)]
    if not rows:
        return "No trial has ended yet."
    return table(("outcome", "trials", "meaning"), rows)


def _commands(view: StudyView) -> str:
    lines = [line for what, command in next_steps(view) for line in (f"# {what}", command)]
    if view.result is not None and view.end_reason is not None:
        lines += ["# train", hidden_command(view.result.command)]
        if view.result.same_batch is not None:
            lines += ["# train at your global batch", hidden_command(view.result.same_batch.command)]
    # An overlong line widens the whole page of optuna-dashboard, including paragraphs.
    return fenced("\n".join(folded(line, width=_LINE_CHARS) for line in lines), "sh", limit_chars=WHOLE_CHARS)


def trial_note(view: StudyView, trial: FrozenTrial) -> str:
    """Return the note of a launched trial: meaning of its outcome, advice, speed, memory and launches."""
    attrs = trial.user_attrs
    outcome = Outcome(attrs.get(attributes.OUTCOME, Outcome.LOST))
    what, advice = MEANING[outcome]
    title = configuration_of(trial)
    remark = " (your config)" if attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG else ""
    parts = [f"## {literal(title)}{remark}", f"**{outcome.value.replace('_', ' ')}**: {what}", _speed(view, trial)]
    message = attrs.get(attributes.MESSAGE, "")
    report = view.last_report(trial)
    if message and outcome is not Outcome.MEASURED:
        parts.append(f"Message: {code(message)}")
    if advice:
        parts.append(f"What to do: {advice}")
    if report is not None and report.error_excerpt.strip() not in ("", message):
        parts.append(fenced(report.error_excerpt))
    parts += [literal(steps_in_words(**attributes.step_facts(trial))), _peak(view, trial), _launches(view, trial)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _speed(view: StudyView, trial: FrozenTrial) -> str:
    measured = None if view.verdict is None else view.verdict.measured.get(trial.number)
    if view.verdict is None or measured is None:
        return ""
    text = f"Speed: {_value(view, measured)}"
    if measured.speed_up is not None and not measured.is_user_config:
        text += f", {times_in_words(measured.speed_up.value)}x as fast as your config"
    text += f"; in the search {_searched(view, measured)}" if measured.rounds else ", in the search"
    if view.verdict.result.number == trial.number:
        text += f". **The best of this study, {literal(how_known(view.verdict))}.**"
    return text


def _peak(view: StudyView, trial: FrozenTrial) -> str:
    attrs, shown = trial.user_attrs, {}
    shown["of the fullest rank"] = attrs.get(attributes.PEAK_BYTES, 0)
    shown["predicted at proposal"] = attrs.get(attributes.PREDICTED_PEAK_BYTES, 0)
    shown["of the device"] = 0 if view.profiled is None else view.profiled.profile.device_memory_bytes
    known = [f"{bytes_in_words(count)} {what}" for what, count in shown.items() if count > 0]
    return f"Peak memory: {', '.join(known)}." if known else ""


def _launches(view: StudyView, trial: FrozenTrial) -> str:
    rows = [
        (
            code(row.report.launch_id),
            row.report.outcome.value.replace("_", " "),
            row.report.host,
            ", ".join(str(device) for device in row.report.devices),
            duration_in_words(row.report.startup_s),
            duration_in_words(row.report.measured_s),
            _step_range(view.step_times.get(row.report.launch_id, ())),
        )
        for row in view.reports.get(trial.number, ())
    ]
    if not rows:
        return ""
    headings = ("launch", "outcome", "host", "devices", "start-up", "steps", "one step, fastest to slowest")
    return "### Launches\n\n" + table(headings, rows)


def _step_range(times_s: Sequence[float]) -> str:
    if not times_s:
        return ""
    return f"{metric_in_words('latency', min(times_s))} to {metric_in_words('latency', max(times_s))}"


def keep_own_text(generated: str, present: str) -> str:
    """Return the note to save: the generated text followed by the users' text of the present note.

    In a note by optuna-dsat the users' text is the text below ``OWN_TEXT``; any other note is kept whole.
    """
    _, mark, written = present.partition(OWN_TEXT)
    written = (written if mark else present).strip()
    return f"{generated.rstrip()}\n\n---\n{OWN_TEXT}\n" + (f"\n{written}\n" if written else "")
