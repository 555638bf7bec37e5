"""Commands on stored studies: list, show, delete; ``db``: the schema of their database."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_dsat.cli.parsing.help import HelpCommand, HelpGroup
from optuna_dsat.cli.parsing.parameters import (
    Json,
    LatestName,
    Name,
    Storage,
    confirm_replacing,
    opened,
    option,
    write,
)
from optuna_dsat.cli.tables import UNBOUNDED, notify, print_table
from optuna_dsat.errors import StorageUrlError, UnreadableStudyError, UsageError
from optuna_dsat.escape.terminal import plain, say, say_prose
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.study.options.declaration import DEFAULT_STORAGE, stored_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from optuna_dsat.store import Store
    from optuna_dsat.study.stored import StoredStudy

_COLUMNS = ("study", "method", "script", "trials", "metric", "best", "trial", "known by", "speed-up", "created")
_DROPPED = ("created", "script", "metric", "known by", "method")
"""Columns of ``studies`` that a narrow terminal leaves out, the first first."""
_MOST_SHOWN = 5
"""Maximum number of search trials in ``show``."""


def read_study(storage: str, name: str | None) -> StoredStudy:
    """Return a study of a database; the latest one without a name."""
    from optuna_dsat.study.stored import read_stored

    with opened(storage, name) as (store, name):
        return read_stored(store, name)


def studies(storage: Storage = DEFAULT_STORAGE, as_json: Json = False) -> None:
    """List the studies in a database."""
    from optuna_dsat.store import Store
    from optuna_dsat.study.stored import StoredStudy, readable_studies
    from optuna_dsat.words import date_in_words

    with Store.open(storage, create=False) as store:
        result = list(readable_studies(store))
    unreadable = [study for study in result if isinstance(study, UnreadableStudyError)]
    readable = [study for study in result if isinstance(study, StoredStudy)]
    rows = [
        {
            "study": study.spec.name,
            "method": study.spec.method,
            "script": study.spec.script.script,
            "trials": f"{study.launches_used}/{study.spec.max_trials}",
            "metric": study.metric,
            "device": study.spec.device,
            **_result(study)[0],
            "created": date_in_words(study.record.created_at),
        }
        for study in readable
    ]
    if as_json:
        rows += [{"study": study.name, "unreadable": study.reason} for study in unreadable]
        print(json.dumps(rows, indent=2))
    else:
        shown = [{**row, **_result(study)[1]} for row, study in zip(rows, readable, strict=True)]
        if shown:
            rows_shown = [[row[name] for name in _COLUMNS] for row in shown]
            print_table(_COLUMNS, rows_shown, drop=_DROPPED, piped_width=UNBOUNDED)
        elif not unreadable:
            say_prose("There is no study in this database.")
        for item in unreadable:
            say_prose(f"{item.name} cannot be read: {item.reason}.")


def _result(study: StoredStudy) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the current result of a study as plain values, and in words; None values if nothing was measured."""
    from optuna_dsat.words import things_in_words, times_in_words

    verdict = study.verdict
    if verdict is None:
        values = dict.fromkeys(("best", "best_trial", "result", "rounds", "speed_up"))
        return values, {"best": None, "trial": None, "known by": "", "speed-up": None}
    result = verdict.result
    speed_up = None if verdict.speed_up is None else verdict.speed_up.value
    values = {"best": result.value, "best_trial": result.number, "result": verdict.kind.value}
    words = {
        "best": study.speed(result).brief,
        "trial": result.number,
        "known by": things_in_words(result.rounds, "round") if verdict.is_by_rounds else "the search",
        "speed-up": None if speed_up is None else times_in_words(speed_up),
    }
    return {**values, "rounds": result.rounds, "speed_up": speed_up}, words


def show(name: LatestName = None, storage: Storage = DEFAULT_STORAGE, as_json: Json = False) -> None:
    """Show a study: what it tunes, how far it is, its best configuration."""
    from collections import Counter

    from optuna_dsat.study.end_reason import headroom_in_words
    from optuna_dsat.study.stored import read_launches, read_stored
    from optuna_dsat.trials import attributes

    with opened(storage, name) as (store, name):
        study = read_stored(store, name)
        launches = read_launches(store, study.record)
    spec, verdict, headroom = study.spec, study.verdict, study.attributes.get(attributes.HEADROOM)
    ended = [t.user_attrs for t in study.trials if attributes.OUTCOME in t.user_attrs]
    outcomes = Counter(of[attributes.OUTCOME] for of in ended)
    if as_json:
        state = {
            "spec": hidden_data(study.stored_spec.stored()),
            "versions": dict(study.record.versions),
            "outcomes": outcomes,
            "launches": [{"purpose": row.purpose, "outcome": row.report.outcome.value} for row in launches],
            "metric": study.metric,
            "headroom": headroom,
            "verdict": None if verdict is None else verdict.to_json(),
            "best": None if study.best is None else study.row(study.best.trial),
        }
        print(json.dumps(state, indent=2))
        return
    say_prose(f"Study {name}: {spec.method}, {study.metric}, script {spec.script.script}")
    simplifying = Counter(of[attributes.OUTCOME] for of in ended if attributes.SIMPLIFIES in of)
    for line in launch_lines(outcomes - simplifying, simplifying, used=study.launches_used, most=spec.max_trials):
        say_prose(line)
    if headroom is not None:
        say_prose(headroom_in_words(headroom))
    for line in result_lines(study):
        say_prose(line)
    for line in _command_lines(study, storage):
        say(line)


def launch_lines(outcomes: Mapping[str, int], simplifying: Mapping[str, int], *, used: int, most: int) -> Iterator[str]:
    """Yield the number of trials by outcome; those that do not count, as they simplify or were lost, are separate."""
    from optuna_dsat.outcome import Outcome
    from optuna_dsat.words import outcomes_in_words, things_in_words

    counted, beyond = (
        outcomes_in_words({outcome: count for outcome, count in each.items() if outcome != Outcome.LOST})
        for each in (outcomes, simplifying)
    )
    yield f"Trials: {used} of at most {most}{f' ({counted})' if counted else ''}."
    if beyond:
        yield f"Not counted: a trial of the best without settings that may have no effect ({beyond})."
    if lost := outcomes.get(Outcome.LOST, 0) + simplifying.get(Outcome.LOST, 0):
        taken = things_in_words(lost, "trial")
        yield f"Not counted: {taken} lost by a stop or a crash; each is repeated under another number."


def result_lines(study: StoredStudy) -> Iterator[str]:
    """Yield the lines on the result, on the confirmation measurements, and on the best trial of the search."""
    from optuna_dsat.study.confirm.speeds import speed_of
    from optuna_dsat.study.confirm.words import how_known, value_in_words, verdict_in_words
    from optuna_dsat.study.end_reason import describe_structure_failures
    from optuna_dsat.trials import attributes
    from optuna_dsat.words import steps_in_words, things_in_words

    verdict, named = study.verdict, {"metric": study.metric, "device": study.spec.device}
    if verdict is None:
        yet = "" if study.launches_used >= study.spec.max_trials else " yet"
        yield f"Nothing was measured{yet}."
        if message := attributes.commonest_message(study.trials):
            yield f"Launches ended with: {message}"
        return
    value, best = value_in_words(verdict, **named), verdict.result
    yield f"Best: trial {best.number}, {best.words}: {value}, {how_known(verdict)}."
    yield from verdict_in_words(verdict, **named)
    yield from filter(None, (describe_structure_failures(study.trials), study.rounds.failures_in_words()))
    yield "The search's best, by few steps each:" if verdict.is_by_rounds else "The search's best:"
    for trial in study.measured[:_MOST_SHOWN]:
        measured = verdict.measured[trial.number]
        again = f"{study.speed(measured).brief} in {things_in_words(measured.rounds, 'round')}"
        remarks = [again] if measured.rounds else []
        remarks += filter(None, [steps_in_words(**attributes.step_facts(trial))])
        value = speed_of(measured.searched_metrics, measured.searched_value, **named).text
        yield f"- trial {trial.number}: {value}, {measured.words}" + (f" ({'; '.join(remarks)})" if remarks else "")


def _command_lines(study: StoredStudy, storage: str) -> Iterator[str]:
    """Yield the commands that continue an unfinished search and train with the answers at the user's and any batch."""
    from optuna_dsat.store import display_url
    from optuna_dsat.study.end_reason import EndReason, continuing
    from optuna_dsat.trials import attributes

    verdict, name, url = study.verdict, study.spec.name, display_url(storage)
    reason = study.attributes.get(attributes.END_REASON)
    yield from continuing(study.spec, storage, reason=reason, verdict=verdict)
    if reason in (None, EndReason.INTERRUPTED):
        yield f"The search has not ended. Continue or join it with: {stored_command('resume', name, storage=url)}"
    if verdict is None:
        return
    train = partial(stored_command, "train", name, storage=url)
    same = verdict.same_batch
    if same is not None and same.number != verdict.result.number:
        yield f"Train at your global batch with: {train('--trial', str(same.number))}"
    yield f"Train with the result: {train()}"


def best(
    name: LatestName = None,
    storage: Storage = DEFAULT_STORAGE,
    output: Annotated[Path | None, option("--output", "-o", help="Write the config to this file.")] = None,
    same_batch: Annotated[
        bool, option("--same-batch", help="Print the fastest config at the global batch of your config instead.")
    ] = False,
) -> None:
    """Print a study's best config, ready for training."""
    from optuna_dsat.study.config_changes import model_change_in_words

    study = read_study(storage, name)
    trial, words = study.selected(same_batch=same_batch)
    notify(f"Config of {words}")
    complete = study.complete_config(trial)
    if words := model_change_in_words(complete, study.spec.ds_config):
        notify(words)
    config = study.ready_config(trial)
    if output is None:
        print(json.dumps(config, indent=2))
    else:
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        confirm_replacing(output, is_ours=lambda old: _is_config_of(study, old))
        write(output, text)


def _is_config_of(study: StoredStudy, text: str) -> bool:
    """Return whether a text is the config of a study's trial, as written by ``best``."""
    from optuna_dsat.trials import attributes

    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return any(study.ready_config(trial) == config for trial in study.trials if attributes.METRICS in trial.user_attrs)


def delete(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a study from the database; files in the output directory are kept."""
    from optuna_dsat.study.stored import record_of

    with opened(storage, name) as (store, name):
        record_of(store, name)
        _refuse_live(store, name)
        if not yes:
            if not sys.stdin.isatty():
                raise UsageError(f"{name}: there is no terminal to ask at; delete it with --yes.")
            typer.confirm(f"Delete the study {plain(name)!r} and all its trials?", abort=True, err=True)
            _refuse_live(store, name)
        store.delete_study(name)
    say(f"Deleted the study {name!r}.", file=sys.stderr)


def _refuse_live(store: Store, name: str) -> None:
    """Raise if a study is being searched."""
    from optuna_dsat.study.folder import is_held
    from optuna_dsat.study.live_state import read_states
    from optuna_dsat.study.stored import read_stored

    states = read_states(store, name, now=time.time())
    workers = ", ".join(state.worker.name for state in states if state.worker is not None)
    if not workers:
        try:
            folder = read_stored(store, name).stored_spec.study_dir
        except UnreadableStudyError:
            return  # from a version that cannot be running
        workers = f"a search that holds {folder}" if is_held(folder) else ""
    if workers:
        raise UsageError(f"The study {name!r} is being searched by {workers}: end that search first.")


def _upgrade(storage: Storage = DEFAULT_STORAGE) -> None:
    """Bring a database made by an older version up to date."""
    from optuna_dsat.store import database_exists, display_url, has_our_tables, migrate
    from optuna_dsat.store.database import Database

    if database_exists(storage) and not has_our_tables(storage):
        raise StorageUrlError(
            f"There is nothing to upgrade in the database {display_url(storage)}: optuna-dsat has no tables in it. "
            "A search makes them; name the right database with --storage."
        )
    with closing(Database(storage, create=False)) as opened:
        opened.exclusively("upgrade the tables", lambda: migrate.upgrade(opened))
        print(migrate.current(opened))


database = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, cls=HelpGroup)
database.command("upgrade", cls=HelpCommand)(_upgrade)


@database.callback()
def _database() -> None:
    """The database's schema."""
