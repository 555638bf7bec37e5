"""``trials`` and ``export``: the trials of a study, as a table and as data."""

from __future__ import annotations

import csv
import json
import math
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_dsat.cli.parsing.parameters import Json, LatestName, Storage, option
from optuna_dsat.cli.studies import read_study
from optuna_dsat.cli.tables import UNBOUNDED, print_table
from optuna_dsat.escape.terminal import plain, say_prose
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.study.options.declaration import DEFAULT_STORAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optuna_dsat.study.stored import StoredStudy

_DROPPED = ("message", "other settings", "in the search")
"""Columns that a narrow terminal leaves out, the first first."""
_UNIT = " samples/s"


class ExportFormat(StrEnum):
    """Formats of ``export``."""

    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"


class TrialOrder(StrEnum):
    """Orders of ``trials``."""

    NUMBER = "number"
    SPEED = "speed"
    MICRO_BATCH = "micro-batch"
    MEMORY = "memory"
    ENERGY = "energy"


def trials(
    name: LatestName = None,
    storage: Storage = DEFAULT_STORAGE,
    sort: Annotated[
        TrialOrder,
        typer.Option("--sort", help="Order: the fastest, largest micro-batch, most memory or samples per joule first."),
    ] = TrialOrder.NUMBER,
    top: Annotated[int | None, option("--top", help="Show only the first N.", metavar="N", min=1)] = None,
    as_json: Json = False,
) -> None:
    """List the trials of a study."""
    study = read_study(storage, name)
    rows = _sorted_rows(study, sort)[:top]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        say_prose("The study has no trial yet: the profile launch comes first.")
        return
    headings, table = _trial_table(study, rows, energy=sort is TrialOrder.ENERGY)
    print_table(headings, table, drop=_DROPPED, piped_width=UNBOUNDED)


def _sorted_rows(study: StoredStudy, order: TrialOrder) -> list[dict[str, Any]]:
    """Return the rows of all trials; trials without the value that is sorted by come last."""
    from optuna_dsat.config.ds_config import MICRO_BATCH
    from optuna_dsat.metrics import PER_JOULE

    def key(row: Mapping[str, Any]) -> float:
        values = {
            TrialOrder.NUMBER: row["number"],
            TrialOrder.SPEED: -(_measured_value(row) or 0) * (1 if study.maximize else -1),
            TrialOrder.MICRO_BATCH: -((row["config"] or {}).get(MICRO_BATCH) or 0),
            TrialOrder.MEMORY: -(row["peak_memory_bytes"] or 0),
            TrialOrder.ENERGY: -row["metrics"].get(PER_JOULE, 0.0),
        }
        return values[order] or (math.inf if order is not TrialOrder.NUMBER else 0)

    return sorted((study.row(trial) for trial in study.trials), key=key)


def _measured_value(row: Mapping[str, Any]) -> float | None:
    """Return the metric of a trial in the rounds, else in the search; None if it was not measured to its end."""
    from optuna_dsat.outcome import Outcome

    searched = row["value"] if row["outcome"] == Outcome.MEASURED else None
    value: float | None = searched if row["confirmed_value"] is None else row["confirmed_value"]
    return value


def _trial_table(
    study: StoredStudy, rows: Sequence[Mapping[str, Any]], *, energy: bool = False
) -> tuple[list[str], list[list[object]]]:
    """Return the headings and rows of a table of trials; a unit that all speeds share is in the heading."""
    from optuna_dsat.metrics import PER_JOULE, speed_up
    from optuna_dsat.study.confirm.speeds import speed_of
    from optuna_dsat.words import KNOBS_APART, count_in_words, outcome_in_words, times_in_words

    measured = {} if study.verdict is None else study.verdict.measured

    def speed(row: Mapping[str, Any]) -> str:
        return study.speed(measured[row["number"]]).brief if row["number"] in measured else ""

    def searched_speed(row: Mapping[str, Any]) -> str:
        if row["value"] is None:
            return ""
        return speed_of(row["metrics"], row["value"], metric=study.metric, device=study.spec.device).brief

    user = None if study.baseline is None else study.baseline.value  # as the table shows it
    speeds = [[speed(row), searched_speed(row)] for row in rows]
    shared = all(text.endswith(_UNIT) for pair in speeds for text in pair if text)
    if shared:
        speeds = [[text.removesuffix(_UNIT) for text in pair] for pair in speeds]
    table: list[list[object]] = []
    for row, (shown, searched) in zip(rows, speeds, strict=True):
        config, _, settings = (row["configuration"] or "").partition(KNOBS_APART)
        structure, _, micro_batch = config.partition(", micro-batch ")
        value = _measured_value(row)
        ratio = row["speed_up"] or (value and speed_up(row["value"], user, maximize=study.maximize))
        times, mark = times_in_words(ratio) if ratio else "", "yes" if row["handed_over"] else ""
        facts = [row["number"], structure, micro_batch, shown or outcome_in_words(row["outcome"] or row["state"])]
        per_joule = row["metrics"].get(PER_JOULE)
        used = [count_in_words(per_joule) if per_joule else ""] if energy else []
        differs = searched if searched != shown else ""
        table.append([*facts, *used, times, mark, differs, settings, row["reason"], row["message"]])
    headings = ["number", "structure", "micro-batch", _UNIT.strip() if shared else "speed"]
    headings += [*(["samples/J"] if energy else []), "x yours", "best"]
    return [*headings, "in the search", "other settings", "reason", "message"], table


def export(
    name: LatestName = None,
    storage: Storage = DEFAULT_STORAGE,
    fmt: Annotated[ExportFormat, typer.Option("--format", help="Format.")] = ExportFormat.JSON,
) -> None:
    """Print all trials of a study as JSON, with versions and hardware, as CSV or as a table in Markdown."""
    from optuna_dsat.study.stored import columns_of, flat_rows

    study = read_study(storage, name)
    rows = [study.row(trial) for trial in study.trials]
    if fmt is ExportFormat.JSON:
        verdict = None if study.verdict is None else study.verdict.to_json()
        record = {"spec": hidden_data(study.stored_spec.stored()), "versions": dict(study.record.versions)}
        record |= {"hardware": _hardware(study), "verdict": verdict, "trials": rows}
        print(json.dumps(record, indent=2))
        return
    if fmt is ExportFormat.MARKDOWN:
        for line in _markdown(study, rows):
            print(line)
        return
    table = flat_rows(rows)
    writer = csv.writer(sys.stdout)
    writer.writerow(map(plain, columns_of(table)))
    for row in table:
        writer.writerow([plain(cell) if isinstance(cell, str) else cell for cell in row.values()])


def _hardware(study: StoredStudy) -> dict[str, Any]:
    """Return the hardware of a launch; the device is None before the profile launch."""
    profile, spec = None if study.profiled is None else study.profiled.profile, study.spec
    return {
        "device": None if profile is None else profile.device_name,
        "device_memory_bytes": None if profile is None else profile.device_memory_bytes,
        "kind": spec.device,
        "slots_per_trial": spec.slots_per_trial,
        "nodes_per_trial": spec.nodes_per_trial,
    }


def _markdown(study: StoredStudy, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the result of a study, its trials and its versions in Markdown, such as for a pull request."""
    from optuna_dsat.escape.markdown import literal, table
    from optuna_dsat.study.confirm.words import answers_in_words

    yield f"### {literal(study.spec.name)}\n"
    if study.verdict is not None:
        for line in answers_in_words(study.verdict, metric=study.metric, device=study.spec.device):
            yield f"{literal(line)}\n"
    yield f"{table(*_trial_table(study, rows))}\n"
    versions = [f"{name} {version}" for name, version in sorted(study.record.versions.items())]
    device = _hardware(study)["device"]
    yield literal(", ".join([f"{study.spec.slots_per_trial} x {device or study.spec.device}", *versions]))
