"""Commands on stored studies: list, show, export, delete, resume, join; and on the database itself."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_dsat.cli.parameters import DEFAULT_STORAGE, Name, Storage
from optuna_dsat.errors import NothingRunnableError, UsageError
from optuna_dsat.script.module_file import module_file

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from optuna_dsat.store import Store, StudyRecord
    from optuna_dsat.study.spec import StudySpec

__all__ = ["add_commands"]

_UNBOUNDED = 10_000
"""Columns of a table that no terminal limits."""
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Show the result alone.")]
_MaxTrials = Annotated[
    int | None, typer.Option("--max-trials", help="New number of launches of trials.", show_default=False)
]
_MinGain = Annotated[
    float | None,
    typer.Option(
        "--min-gain", help="guided: new share by which something must be expected to be better.", show_default=False
    ),
]
_WaitForGpus = Annotated[
    float | None,
    typer.Option("--wait-for-gpus", help="New limit of the wait for GPUs that others hold, in s.", show_default=False),
]
_Workdir = Annotated[
    Path | None,
    typer.Option(
        "--workdir",
        help="Working directory, where the script lies elsewhere on this machine.",
        show_default=False,
    ),
]


class ExportFormat(StrEnum):
    """Formats of ``export``."""

    JSON = "json"
    CSV = "csv"


def _open(storage: str) -> Store:
    from optuna_dsat.store import Store

    return Store.open(storage, create=False)


def _record(store: Store, name: str) -> StudyRecord:
    from optuna_dsat.study.stored import record_of

    return record_of(store, name)


def _spec(record: StudyRecord) -> StudySpec:
    from optuna_dsat.study.spec import StudySpec

    return StudySpec.model_validate(dict(record.spec))


def _study(store: Store, name: str) -> optuna.Study:
    import optuna

    return optuna.load_study(study_name=name, storage=store.storage)


def _trials(store: Store, name: str) -> Sequence[FrozenTrial]:
    return _study(store, name).get_trials(deepcopy=False)


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    width = None if sys.stdout.isatty() else _UNBOUNDED  # what reads a pipe wants whole lines
    Console(highlight=False, width=width).print(table)


def studies(storage: Storage = DEFAULT_STORAGE, as_json: _Json = False) -> None:
    """List the studies of a database."""
    from optuna_dsat.trials import attributes

    rows = []
    with _open(storage) as store:
        for record in store.list_studies():
            spec = _spec(record)
            trials = _trials(store, record.name)
            best = attributes.best_trials(trials, maximize=spec.direction == "maximize")
            rows.append(
                {
                    "study": record.name,
                    "method": spec.method,
                    "script": spec.script.script,
                    "launches": f"{attributes.launches_used(trials)}/{spec.max_trials}",
                    "metric": spec.metric,
                    "best": best[0].values[0] if best else None,
                    "created": time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_at)),
                }
            )
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        headings = ("study", "method", "script", "launches", "metric", "best", "created")
        shown = [{**row, "best": _value_in_words(row["metric"], row["best"])} for row in rows]
        _print_table(headings, [[row[heading] for heading in headings] for row in shown])


def _value_in_words(metric: Any, value: Any) -> str | None:
    from optuna_dsat.words import metric_in_words

    return None if value is None else metric_in_words(metric, value)


def show(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: _Json = False) -> None:
    """Show a study: what it tunes, how far it is, its best configuration."""
    from collections import Counter

    from optuna_dsat.study.result import trial_row
    from optuna_dsat.trials import attributes
    from optuna_dsat.words import config_in_words, metric_in_words

    with _open(storage) as store:
        record = _record(store, name)
        spec = _spec(record)
        trials = _trials(store, name)
        launches = store.launches(record.uuid)
    best = attributes.best_trials(trials, maximize=spec.direction == "maximize")
    outcomes = Counter(t.user_attrs[attributes.OUTCOME] for t in trials if attributes.OUTCOME in t.user_attrs)
    if as_json:
        state = {
            "spec": spec.model_dump(mode="json"),
            "versions": dict(record.versions),
            "outcomes": outcomes,
            "launches": [{"purpose": row.purpose, "outcome": row.report.outcome.value} for row in launches],
            "best": trial_row(best[0]) if best else None,
        }
        print(json.dumps(state, indent=2))
        return
    print(f"Study {name}: {spec.method}, {spec.metric}, script {spec.script.script}")
    print(f"Launches: {attributes.launches_used(trials)} of {spec.max_trials}; {dict(outcomes)}")
    for trial in best[:5]:
        words = config_in_words(trial.user_attrs[attributes.CONFIG])
        print(f"  trial {trial.number}: {metric_in_words(spec.metric, trial.values[0])}, {words}")


def trials(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: _Json = False) -> None:
    """List the trials of a study."""
    from optuna_dsat.study.result import trial_row

    with _open(storage) as store:
        metric = _spec(_record(store, name)).metric
        rows = [trial_row(trial) for trial in _trials(store, name)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    headings = ("number", "outcome", "value", "configuration", "message")
    shown = [
        {
            **row,
            "outcome": row["outcome"] or row["state"],
            "value": _value_in_words(metric, row["value"]),
        }
        for row in rows
    ]
    _print_table(headings, [[row[heading] for heading in headings] for row in shown])


def best(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the config to this file.", show_default=False)
    ] = None,
) -> None:
    """Print the best configuration of a study, ready to train with."""
    from optuna_dsat.config import ds_config
    from optuna_dsat.study.stored import read_stored

    with _open(storage) as store:
        study = read_stored(store, name)
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

    with _open(storage) as store:
        spec = _spec(_record(store, name))
        rows = [trial_row(trial) for trial in _trials(store, name)]
    if fmt is ExportFormat.JSON:
        print(json.dumps({"spec": spec.model_dump(mode="json"), "trials": rows}, indent=2))
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
    with _open(storage) as store:
        _record(store, name)
        if not yes:
            typer.confirm(f"Delete the study {name!r} and all its trials?", abort=True, err=True)
        store.delete_study(name)
    sys.stderr.write(f"Deleted the study {name!r}.\n")


def resume(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    max_trials: _MaxTrials = None,
    min_gain: _MinGain = None,
    wait_for_gpus: _WaitForGpus = None,
    workdir: _Workdir = None,
    quiet: _Quiet = False,
    as_json: _Json = False,
) -> None:
    """Continue a study where it stands, with the settings it was started with."""
    limits = {"max_trials": max_trials, "min_gain": min_gain, "wait_for_gpus_s": wait_for_gpus}
    _continue(name, storage, limits=limits, workdir=workdir, quiet=quiet, as_json=as_json, conclude=True)


def worker(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    workdir: _Workdir = None,
    quiet: _Quiet = False,
) -> None:
    """Join a study from another process or machine; whoever started it confirms and exports the winner."""
    _continue(name, storage, limits={}, workdir=workdir, quiet=quiet, as_json=False, conclude=False)


def _continue(
    name: str,
    storage: str,
    *,
    limits: Mapping[str, float | None],
    workdir: Path | None,
    quiet: bool,
    as_json: bool,
    conclude: bool,
) -> None:
    from optuna_dsat.cli.search import run_request
    from optuna_dsat.launch.devices import cpu_devices, detect_devices
    from optuna_dsat.study.request import StudyRequest
    from optuna_dsat.study.spec import make_spec

    with _open(storage) as store:
        record = _record(store, name)
        spec = _spec(record)
        given = {limit: value for limit, value in limits.items() if value is not None}
        if "min_gain" in given and spec.method != "guided":
            raise UsageError(f"--min-gain is an option of guided; this study is searched by {spec.method}.")
        if given:
            spec = make_spec(**_with_limits(spec.model_dump(), given))
            store.update_spec(record.uuid, spec.model_dump(mode="json"))
    spec = _relocated(spec, workdir)
    devices = detect_devices() if spec.device == "cuda" else cpu_devices(spec.slots_per_trial)
    for notice in devices.notices:
        sys.stderr.write(f"{notice}\n")
    if devices.kind != spec.device or len(devices.devices) < spec.slots_per_trial:
        raise UsageError(
            f"The study needs {spec.slots_per_trial} {spec.device} slots a launch; "
            f"this machine offers {len(devices.devices)} of {devices.kind}."
        )
    request = StudyRequest(
        spec=spec, devices=devices, storage=storage, conclude=conclude, relocated=workdir is not None
    )
    run_request(request, quiet=quiet, as_json=as_json)


def _with_limits(values: dict[str, Any], limits: Mapping[str, float]) -> dict[str, Any]:
    """Return a spec's values with other limits, those of its method included."""
    own = {name: value for name, value in limits.items() if name in values["options"]}
    others = {name: value for name, value in limits.items() if name not in own}
    return {**values, **others, "options": {**values["options"], **own}}


def _relocated(spec: StudySpec, workdir: Path | None) -> StudySpec:
    """Return the spec with its paths moved from the stored working directory to ``workdir``."""
    script = spec.script
    if workdir is not None:
        if not workdir.is_dir():
            raise UsageError(f"--workdir is {workdir}, which is not a directory.")
        new = workdir.resolve()

        def moved(path: str) -> str:
            inside = Path(path).is_relative_to(script.cwd)
            return str(new / Path(path).relative_to(script.cwd)) if inside else path

        script = script.model_copy(
            update={
                "cwd": str(new),
                "script": script.script if script.is_module else moved(script.script),
                "config_path": moved(script.config_path),
            }
        )
        spec = spec.model_copy(update={"script": script, "output_dir": moved(spec.output_dir)})
    if script.is_module and module_file(script.script, Path(script.cwd)) is None:
        raise UsageError(
            f"The module {script.script} is not found from {script.cwd}; say with --workdir where it lies."
        )
    if not script.is_module and not Path(script.script).is_file():
        raise UsageError(f"The script {script.script} is not on this machine; say with --workdir where it lies.")
    return spec


def _db_upgrade(storage: Storage = DEFAULT_STORAGE) -> None:
    """Bring a database made by an older version up to date."""
    from optuna_dsat.store import migrate
    from optuna_dsat.store.database import Database

    database = Database(storage)
    try:
        migrate.upgrade(database)
        print(migrate.current(database))
    finally:
        database.close()


def _db_current(storage: Storage = DEFAULT_STORAGE) -> None:
    """Print the schema revision of a database."""
    from optuna_dsat.store import migrate
    from optuna_dsat.store.database import Database

    database = Database(storage, create=False)
    try:
        print(migrate.current(database))
    finally:
        database.close()


def _db_check(storage: Storage = DEFAULT_STORAGE) -> None:
    """Say whether this version can use a database; exit with 2 if not."""
    from optuna_dsat.store import migrate
    from optuna_dsat.store.database import Database

    database = Database(storage, create=False)
    try:
        migrate.require_usable(database)
        print(migrate.check(database).value)
    finally:
        database.close()


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    for command in (studies, show, trials, best, export, delete, resume, worker):
        app.command()(command)
    database = typer.Typer(help="The database's schema.", no_args_is_help=True)
    database.command("upgrade")(_db_upgrade)
    database.command("current")(_db_current)
    database.command("check")(_db_check)
    app.add_typer(database, name="db")
