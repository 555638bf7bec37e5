"""Commands on stored studies: list, show, export, delete."""

from __future__ import annotations

import csv
import json
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_dsat.cli.parameters import DEFAULT_STORAGE, Json, Name, Storage
from optuna_dsat.cli.tables import UNBOUNDED, print_table
from optuna_dsat.errors import NothingRunnableError, UsageError

if TYPE_CHECKING:
    from optuna_dsat.store import Store
    from optuna_dsat.study.stored import StoredStudy

__all__ = ["add_commands"]


class ExportFormat(StrEnum):
    """Formats of ``export``."""

    JSON = "json"
    CSV = "csv"


def _open(storage: str) -> Store:
    from optuna_dsat.store import Store

    return Store.open(storage, create=False)


def _read(storage: str, name: str) -> StoredStudy:
    from optuna_dsat.study.stored import read_stored

    with _open(storage) as store:
        return read_stored(store, name)


def studies(storage: Storage = DEFAULT_STORAGE, as_json: Json = False) -> None:
    """List the studies of a database."""
    from optuna_dsat.study.stored import read_stored

    with _open(storage) as store:
        found = [read_stored(store, record.name) for record in store.list_studies()]
    rows = [
        {
            "study": study.spec.name,
            "method": study.spec.method,
            "script": study.spec.script.script,
            "launches": f"{study.launches_used}/{study.spec.max_trials}",
            "metric": study.metric,
            "best": study.measured[0].values[0] if study.measured else None,
            "created": time.strftime("%Y-%m-%d %H:%M", time.localtime(study.record.created_at)),
        }
        for study in found
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        headings = ("study", "method", "script", "launches", "metric", "best", "created")
        shown = [{**row, "best": _value_in_words(row["metric"], row["best"])} for row in rows]
        print_table(headings, [[row[heading] for heading in headings] for row in shown], piped_width=UNBOUNDED)


def _value_in_words(metric: Any, value: Any) -> str | None:
    from optuna_dsat.words import metric_in_words

    return None if value is None else metric_in_words(metric, value)


def show(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: Json = False) -> None:
    """Show a study: what it tunes, how far it is, its best configuration."""
    from collections import Counter

    from optuna_dsat.study.result import trial_row
    from optuna_dsat.study.stored import read_stored
    from optuna_dsat.trials import attributes
    from optuna_dsat.words import config_in_words, metric_in_words, steps_in_words

    with _open(storage) as store:
        study = read_stored(store, name)
        launches = store.launches(study.record.uuid)
    spec, best = study.spec, study.measured
    outcomes = Counter(t.user_attrs[attributes.OUTCOME] for t in study.trials if attributes.OUTCOME in t.user_attrs)
    if as_json:
        state = {
            "spec": study.stored_spec.model_dump(mode="json"),
            "versions": dict(study.record.versions),
            "outcomes": outcomes,
            "launches": [{"purpose": row.purpose, "outcome": row.report.outcome.value} for row in launches],
            "best": trial_row(best[0]) if best else None,
        }
        print(json.dumps(state, indent=2))
        return
    print(f"Study {name}: {spec.method}, {study.metric}, script {spec.script.script}")
    print(f"Launches: {study.launches_used} of {spec.max_trials}; {dict(outcomes)}")
    for trial in best[:5]:
        words = config_in_words(trial.user_attrs[attributes.CONFIG])
        told = steps_in_words(**attributes.step_facts(trial))
        value = metric_in_words(study.metric, trial.values[0])
        print(f"  trial {trial.number}: {value}, {words}" + (f" ({told})" if told else ""))


def trials(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: Json = False) -> None:
    """List the trials of a study."""
    from optuna_dsat.study.result import trial_row

    study = _read(storage, name)
    rows = [trial_row(trial) for trial in study.trials]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    headings = ("number", "outcome", "value", "configuration", "message")
    shown = [
        {
            **row,
            "outcome": row["outcome"] or row["state"],
            "value": _value_in_words(study.metric, row["value"]),
        }
        for row in rows
    ]
    print_table(headings, [[row[heading] for heading in headings] for row in shown], piped_width=UNBOUNDED)


def best(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the config to this file.", show_default=False)
    ] = None,
) -> None:
    """Print the best configuration of a study, ready to train with."""
    from optuna_dsat.config import ds_config

    study = _read(storage, name)
    if study.best is None:
        raise NothingRunnableError(f"The study {name!r} has measured nothing yet.")
    config = study.ready_config(study.best.trial)
    if output is None:
        print(json.dumps(config, indent=2))
    else:
        try:
            ds_config.write_json_atomic(output, config)
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}.") from None
        print(output)


def export(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    fmt: Annotated[ExportFormat, typer.Option("--format", help="Format.")] = ExportFormat.JSON,
) -> None:
    """Print all trials of a study as JSON or CSV."""
    from optuna_dsat.study.result import trial_row

    study = _read(storage, name)
    rows = [trial_row(trial) for trial in study.trials]
    if fmt is ExportFormat.JSON:
        print(json.dumps({"spec": study.stored_spec.model_dump(mode="json"), "trials": rows}, indent=2))
        return
    plain = (
        "number",
        "state",
        "outcome",
        "value",
        "configuration",
        "attempts",
        "peak_memory_bytes",
        "message",
    )
    params = sorted({key for row in rows for key in row["params"]})
    metrics = sorted({key for row in rows for key in row["metrics"]})
    writer = csv.writer(sys.stdout)
    writer.writerow([*plain, *(f"param:{key}" for key in params), *(f"metric:{key}" for key in metrics)])
    for row in rows:
        writer.writerow(
            [row[key] for key in plain]
            + [row["params"].get(key) for key in params]
            + [row["metrics"].get(key) for key in metrics]
        )


def delete(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a study from the database; its files in the output directory stay."""
    from optuna_dsat.study.stored import record_of

    with _open(storage) as store:
        record_of(store, name)
        if not yes:
            typer.confirm(f"Delete the study {name!r} and all its trials?", abort=True, err=True)
        store.delete_study(name)
    sys.stderr.write(f"Deleted the study {name!r}.\n")


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    for command in (studies, show, trials, best, export, delete):
        app.command()(command)
