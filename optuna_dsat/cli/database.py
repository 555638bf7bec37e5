"""``db``: the schema of a study database."""

from __future__ import annotations

from contextlib import closing

import typer

from optuna_dsat.cli.parsing.help import HelpCommand, HelpGroup
from optuna_dsat.cli.parsing.parameters import DEFAULT_STORAGE, Storage
from optuna_dsat.errors import StorageUrlError, UnreadableStudyError
from optuna_dsat.escape.terminal import say_prose


def _upgrade(storage: Storage = DEFAULT_STORAGE) -> None:
    """Bring a database made by an older version up to date."""
    from optuna_dsat.store import display_url, migrate
    from optuna_dsat.store.database import Database

    if _is_new(storage):
        raise StorageUrlError(
            f"There is nothing to upgrade in the database {display_url(storage)}: optuna-dsat has no tables in it. "
            "A search makes them; name the right database with --storage."
        )
    with closing(Database(storage, create=False)) as opened:
        migrate.upgrade(opened)
        print(migrate.current(opened))


def _current(storage: Storage = DEFAULT_STORAGE) -> None:
    """Print the schema revision of a database; "new" for one in which optuna-dsat has no tables."""
    from optuna_dsat.store import migrate
    from optuna_dsat.store.database import Database

    if _is_new(storage):
        print(migrate.SchemaState.NEW.value)
        return
    with closing(Database(storage, create=False)) as opened:
        print(migrate.current(opened))


def _check(storage: Storage = DEFAULT_STORAGE) -> None:
    """Say whether this version can use a database and read its studies; exit with 2 or 5 if not."""
    from optuna_dsat.store import Store, migrate
    from optuna_dsat.store.database import Database
    from optuna_dsat.study.stored import UnreadableStudy, readable_studies

    if _is_new(storage):
        print(migrate.SchemaState.NEW.value)
        return
    with closing(Database(storage, create=False)) as opened:
        print(migrate.require_usable(opened).value)
    with Store.open(storage, create=False) as store:
        unreadable = [item for item in readable_studies(store) if isinstance(item, UnreadableStudy)]
    for study in unreadable:
        say_prose(f"{study.record.name} cannot be read: {study.reason}.")
    if unreadable:
        raise typer.Exit(UnreadableStudyError.exit_code)


def _is_new(storage: str) -> bool:
    """Return whether a database exists without optuna-dsat tables; does not modify it."""
    from optuna_dsat.store import database_exists, has_our_tables

    return database_exists(storage) and not has_our_tables(storage)


database = typer.Typer(
    help="The database's schema.", no_args_is_help=True, add_completion=False, rich_markup_mode=None, cls=HelpGroup
)
for _name, _command in (("upgrade", _upgrade), ("current", _current), ("check", _check)):
    database.command(_name, cls=HelpCommand)(_command)
