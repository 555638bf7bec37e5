"""Prints results and planned searches on stdout; progress is shown by ``display``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna_dsat.cli.tables import UNBOUNDED, print_table
from optuna_dsat.escape.terminal import say, say_prose
from optuna_dsat.launch.isolation import PROTECTED
from optuna_dsat.metrics import shares_of_linear
from optuna_dsat.secrecy.references import hidden_text, without_secrets
from optuna_dsat.study.config_changes import changes_in_words
from optuna_dsat.study.confirm.words import answers_in_words, remarks_in_words
from optuna_dsat.study.end_reason import BUDGETS, continuing, headroom_in_words
from optuna_dsat.study.options.declaration import options_in
from optuna_dsat.study.result import SameBatch, StudyResult
from optuna_dsat.study.spec import StudyRequest, StudySpec
from optuna_dsat.words import (
    count_in_words,
    metric_in_words,
    outcomes_in_words,
    slot_name,
    slot_time_in_words,
    things_in_words,
    times_in_words,
)

if TYPE_CHECKING:
    from optuna_dsat.config.search_space import SearchSpace
    from optuna_dsat.tuning.options.given import Given
    from optuna_dsat.tuning.run import AtGpus

_MOST_SHARE = 1.1
"""Share of linear scaling that noise and caches explain."""
_NOT_LISTED = frozenset({"script", "ds_config", "script_args", "dry_run", "json_output"})


def show_result(
    result: StudyResult, *, as_json: bool, price: float | None = None, request: StudyRequest | None = None
) -> None:
    """Print a result as text, with its cost at a price per GPU hour and the commands that continue, or as JSON."""
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    for line in answers_in_words(result.verdict, metric=result.metric, device=result.device):
        say_prose(line)
    if result.numbers:
        say_prose(result.numbers)
    _show_configs(result)
    if result.changes:
        say_prose(changes_in_words(result.changes))
    remarks = [
        _throughput(result),
        result.learning_rate_advice,
        None if result.loss_check is None or result.numbers else result.loss_check["message"],
        result.rejected,
        *remarks_in_words(result.verdict),
        result.failures,
        result.measurement,
        result.advice,
        result.isolation.removeprefix(PROTECTED).strip(),  # shown with the first launch
        _cost(result, price),
    ]
    say(f"Metrics: {result.metrics_path}")
    for remark in filter(None, remarks):
        say_prose(remark)
    if result.headroom is not None and result.reason in BUDGETS:
        say_prose(headroom_in_words(result.headroom))
    if request is not None:
        for line in continuing(request.spec, request.storage, reason=result.reason, verdict=result.verdict):
            say(line)


def _show_configs(result: StudyResult) -> None:
    """Print the path of each config of a result that is not the user's, and the command that trains with it."""
    configs: list[tuple[str, StudyResult | SameBatch]] = [("Config", result)]
    if result.same_batch is not None and not result.same_batch.is_user_config:
        at_batch = f"At your global batch, trial {result.same_batch.trial}"
        configs = [(at_batch, result.same_batch), (f"Fastest, trial {result.trial}", result)]
    shown = ""
    for what, config in configs:
        say(f"{what}: {config.config_path}")
        if config.model_change not in ("", shown):
            say_prose(config.model_change)
        shown = config.model_change
        say("Train with it:")
        say(f"  {config.command}")


def _throughput(result: StudyResult) -> str:
    """Return the throughput where the answers do not have it, as with the time of a phase; empty elsewhere."""
    samples_per_s = result.metrics.get("throughput")
    speed = result.verdict.result.speed(metric=result.metric, device=result.device)
    if not samples_per_s or speed.samples_per_s is not None:
        return ""
    return f"It trains at {metric_in_words('throughput', samples_per_s)}."


def _cost(result: StudyResult, price: float | None) -> str:
    """Return why the search ended, its trials, launches and GPU minutes, and their cost at a price per GPU hour."""
    minutes = slot_time_in_words(result.slot_minutes * 60, result.device)
    if price is not None:
        cost = result.slot_minutes / 60 * price
        minutes += f", which cost {cost:,.2f} at {price:,.2f} per {slot_name(result.device)} hour"
    made = things_in_words(sum(result.launches.values()) - result.continued, "launch")
    trials = f"{outcomes_in_words(result.launches)}, in {made} besides profile and rounds"
    return f"The search ended: {result.reason}. Trials: {trials}; {minutes}."


def show_by_gpus(result: Sequence[AtGpus], *, best: StudyResult, as_json: bool = False) -> None:
    """Print the results of searches at several numbers of GPUs and the best result's command, or everything as JSON."""
    shares = shares_of_linear([item.samples_per_s_per_gpu for item in result])
    if as_json:
        scaling = [
            {
                "gpus": item.gpus,
                "study": item.study,
                "samples_per_s": item.samples_per_s,
                "samples_per_s_per_gpu": item.samples_per_s_per_gpu,
                "share_of_linear": share,
            }
            for item, share in zip(result, shares, strict=True)
        ]
        print(json.dumps({**best.to_json(), "scaling": scaling}, indent=2))
        return
    unit = slot_name(next((item.run.request.spec.device for item in result if item.run is not None), "cuda"))
    headings = (f"{unit}s", "samples/s in all", f"samples/s per {unit}", "scaling", "speed-up", "study")
    rows = []
    for row, share in zip(result, shares, strict=True):
        speed_up = None if row.result is None else row.result.speed_up
        all_, each, times = (
            "-" if number is None else words(number)
            for words, number in (
                (count_in_words, row.samples_per_s),
                (count_in_words, row.samples_per_s_per_gpu),
                (times_in_words, speed_up),
            )
        )
        rows.append((row.gpus, all_, each, "-" if share is None else f"{share:.0%}", times, row.study))
    print(f"By number of {unit}s:")
    print_table(headings, rows, right=headings[:-1])
    if max((share for share in shares if share), default=0.0) > _MOST_SHARE:
        first = things_in_words(next(item.gpus for item in result if item.samples_per_s), unit)
        say_prose(
            f"Scaling above 100% is not the hardware's: with {first} the search found no config that is as fast per "
            f"{unit}. Memory may allow none, or more trials may find it (--max-trials)."
        )
    say(f"Most samples/s in all: {best.study}. Train with it:\n  {best.command}")


def show_preview(spec: StudySpec, space: SearchSpace, preview: Mapping[str, Any]) -> None:
    """Print the preview of a study that is not started: space, profile launch and the user's config."""
    from optuna_dsat.words import choices_in_words, combinations_in_words

    say_prose("Search space (bucket sizes are capped by the model's size after the profile launch):")
    rows = [
        (row.knob, row.role, row.where, choices_in_words(row.choices, as_range=row.is_range))
        for row in space.describe()
    ]
    print_table(("knob", "role", "where it applies", "choices"), rows)
    say_prose(combinations_in_words(space.classes()))
    if preview["refused"]:
        say_prose(preview["refused"])
    launch, ranks = preview["profile_launch"], things_in_words(spec.slots_per_trial, slot_name(spec.device))
    first, *rest = launch["attempts"]
    say_prose(
        f"Profile launch: {ranks}, micro-batch {launch['micro_batch']}, {first}; when out of memory: "
        f"{', then '.join(rest) or 'nothing else'}."
    )
    say_prose(f"Your config: {preview['baseline']}.")


def options_given(given: Given, output: object) -> dict[str, dict[str, str]]:
    """Return each given option, of the search or its output, with its value in command-line form and its origin."""
    declared = options_in(type(output)) | options_in(type(given.options))
    values = {**vars(output), **vars(given.options)}
    return {
        declared[name].spelled(name): {"value": _in_words(name, values[name]), "from": origin}
        for name, origin in given.origins.items()
        if name not in _NOT_LISTED
    }


def show_options(options: Mapping[str, Mapping[str, str]]) -> None:
    """Print each given option with its value and origin."""
    print("Options that are not left at their defaults:" if options else "Every option is left at its default.")
    if options:
        rows = [(name, option["value"], option["from"]) for name, option in options.items()]
        print_table(("option", "value", "from"), rows, piped_width=UNBOUNDED)


def _in_words(name: str, value: Any) -> str:
    """Format a value as on a command line; secrets are hidden."""
    from optuna_dsat.store import display_url

    if name == "storage":
        return display_url(value)
    if isinstance(value, Mapping):
        pairs = ((key, item if isinstance(item, str) else json.dumps(item)) for key, item in value.items())
        return " ".join(without_secrets([f"{key}={text}" for key, text in pairs]))
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else hidden_text(str(value))
