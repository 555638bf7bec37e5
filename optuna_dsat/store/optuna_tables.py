"""Optuna's tables in a database: created if missing, rejected if their schema differs from this Optuna's."""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import optuna
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from sqlalchemy import Connection, Inspector, create_engine, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from optuna_dsat.errors import StorageUrlError, StudyConflictError
from optuna_dsat.store.database import Database, engine_options, install_events
from optuna_dsat.store.migrate import VERSION_TABLE, scripts_in
from optuna_dsat.store.retry import is_transient, one_line_reason, retrying, tell_lost_commits
from optuna_dsat.store.urls import display_url, parse_url

_VERSION_TABLE = "alembic_version"
_MIGRATIONS = Path(optuna.storages.__file__).parent / "_rdb" / "alembic"


def open_optuna_tables(database: Database) -> RDBStorage:
    """Open Optuna's tables and create missing tables; the caller holds the database's lock.

    Raises:
        StorageUrlError: If they cannot be used, or their schema differs from this Optuna's.
        StorageError: If the database failed.
    """

    def look() -> None:
        with database.engine.connect() as connection:
            refuse_unusable_tables(connection, shown=database.shown)

    retrying(look, database=database.shown, limit_s=database.retry_limit_s)

    def attempt() -> tuple[RDBStorage, str]:
        try:
            rdb = RDBStorage(
                database.url.render_as_string(hide_password=False),
                engine_kwargs=engine_options(database.url),
                skip_compatibility_check=True,  # checked below, where connections are closed on failure
            )
            return rdb, rdb.get_current_version()
        except (DBAPIError, optuna.exceptions.StorageInternalError) as error:
            if is_transient(error):
                raise
            text = f"The storage '{database.shown}' cannot be used: {one_line_reason(error)}."
            raise StorageUrlError(text) from None

    rdb, current = retrying(attempt, database=database.shown, limit_s=database.retry_limit_s)
    # Drop connections that Optuna opened before our settings are installed.
    rdb.remove_session()
    rdb.engine.dispose()
    if current != rdb.get_head_version():
        raise _other_schema(current, rdb.get_head_version(), shown=database.shown)
    install_events(rdb.engine)
    database.guard(rdb.engine)
    tell_lost_commits(rdb.engine)
    return rdb


def refuse_unusable_tables(connection: Connection, *, shown: str) -> None:
    """Raise if a database's tables belong to another application or to another Optuna schema; only reads.

    Raises:
        StorageUrlError: If a foreign table has the name of an Optuna table, or the schema differs from this Optuna's.
    """
    inspector = inspect(connection)
    present = set(inspector.get_table_names())
    current = _stamped(connection) if _VERSION_TABLE in present else None
    if models.VersionInfoModel.__tablename__ not in present:  # otherwise Optuna's, in any schema
        if foreign := (current and _VERSION_TABLE) or _foreign_table(inspector, present):
            raise StorageUrlError(
                f"The storage '{shown}' belongs to another application: its table '{foreign}' is not Optuna's. "
                "Give a database of its own."
            )
        return
    newest = scripts_in(_MIGRATIONS).get_current_head()
    if current is not None and newest is not None and current != newest:
        raise _other_schema(current, newest, shown=shown)


def _foreign_table(inspector: Inspector, present: Container[str]) -> str | None:
    """Return a table that has the name but not all columns of an Optuna table, or None."""
    for table in models.BaseModel.metadata.sorted_tables:
        there = {column["name"] for column in inspector.get_columns(table.name)} if table.name in present else None
        if there is not None and not {column.name for column in table.columns} <= there:
            return str(table.name)
    return None


def _stamped(connection: Connection) -> str | None:
    """Return the schema's revision from Alembic's table; None if it is empty."""
    result = connection.execute(text(f"SELECT version_num FROM {_VERSION_TABLE}")).scalar()
    return None if result is None else str(result)


def _other_schema(current: str, head: str, *, shown: str) -> StorageUrlError:
    known = current in {script.revision for script in scripts_in(_MIGRATIONS).walk_revisions()}
    remedy = f"run: optuna storage upgrade --storage '{shown}'" if known else "install a newer Optuna"
    return StorageUrlError(
        f"Optuna's own tables in {shown} have the schema {current}, and Optuna {optuna.__version__} uses {head}: "
        f"{remedy}"
    )


def has_our_tables(url: str) -> bool:
    """Return whether optuna-dsat created an existing database; also True if it cannot be read.

    Raises:
        StorageUrlError: See ``parse_url``.
    """
    try:
        with _reading(parse_url(url)) as connection:
            return inspect(connection).has_table(VERSION_TABLE)
    except (DBAPIError, OSError):
        return True


def refuse_others_database(url: str, name: str) -> None:
    """Raise if a search could not create our tables or its study in a database without our tables.

    Raises:
        StorageUrlError: If its tables belong to another application, or their schema differs from this Optuna's.
        StudyConflictError: If it contains an Optuna study of this name, which a search would not take over.
    """
    try:
        with _reading(parse_url(url)) as connection:
            refuse_unusable_tables(connection, shown=display_url(url))
            if not inspect(connection).has_table("studies"):
                return
            result = connection.execute(text("SELECT 1 FROM studies WHERE study_name = :name"), {"name": name}).first()
    except (DBAPIError, OSError) as error:
        raise StorageUrlError(f"The storage '{display_url(url)}' cannot be opened: {one_line_reason(error)}.") from None
    if result is not None:
        raise StudyConflictError(
            f"The database has a study '{name}' that optuna-dsat did not make: choose another name with --study."
        )


@contextmanager
def _reading(url: URL) -> Iterator[Connection]:
    """Yield a connection that cannot write to an SQLite file."""
    if url.get_backend_name() == "sqlite":
        file = f"file:{quote(str(url.database))}?mode=ro"
        engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(file, uri=True), hide_parameters=True)
    else:
        engine = create_engine(url, **engine_options(url))
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()
