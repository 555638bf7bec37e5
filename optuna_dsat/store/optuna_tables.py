"""Optuna's tables in a database: created if missing, rejected if their schema differs from this Optuna's."""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import optuna
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _VersionManager
from sqlalchemy import Connection, Inspector, create_engine, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import scoped_session, sessionmaker

from optuna_dsat.errors import StorageUrlError, StudyConflictError
from optuna_dsat.store.database import Database, engine_options, install_events
from optuna_dsat.store.migrate import VERSION_TABLE, all_revisions, newest_revision
from optuna_dsat.store.retry import is_transient, one_line_reason, retrying, tell_lost_commits
from optuna_dsat.store.urls import display_url, parse_url

__all__ = ["has_our_tables", "open_optuna_tables", "refuse_others_database", "refuse_unusable_tables"]

_VERSION_TABLE = "alembic_version"
_MIGRATIONS = Path(optuna.storages.__file__).parent / "_rdb" / "alembic" / "versions"


class _ReadyTables(RDBStorage):
    """Tables that all exist in the newest schema.

    ``RDBStorage`` checks this with Alembic, whose import takes longer than Optuna's; here a single SQL statement did.
    """

    def __init__(self, database: Database) -> None:
        # All attributes set by RDBStorage's constructor, except for attributes unused with an up-to-date database.
        self.url = database.url.render_as_string(hide_password=False)
        self.engine_kwargs = engine_options(database.url)
        self.skip_compatibility_check = True
        self.heartbeat_interval = None
        self.grace_period = None
        self.heartbeat_stale_trial_callback = None
        self.failed_trial_callback = None
        self.engine = create_engine(database.url, **self.engine_kwargs)
        self.scoped_session = scoped_session(sessionmaker(bind=self.engine))

    @cached_property
    def _version_manager(self) -> _VersionManager:  # type: ignore[override]  # an attribute there, made at once
        return _VersionManager(self.url, self.engine, self.scoped_session)


def open_optuna_tables(database: Database) -> RDBStorage:
    """Open Optuna's tables and create missing tables; the caller holds the database's lock.

    Raises:
        StorageUrlError: If they cannot be used, or their schema differs from this Optuna's.
        StorageError: If the database failed.
    """
    newest = newest_revision(_MIGRATIONS)
    rdb = _ReadyTables(database) if newest is not None and _revision(database) == newest else _checked(database, newest)
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
    newest = newest_revision(_MIGRATIONS)
    if current is not None and newest is not None and current != newest:
        raise _other_schema(current, newest, shown=shown, known=current in all_revisions(_MIGRATIONS))


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


def _other_schema(current: str, head: str, *, shown: str, known: bool) -> StorageUrlError:
    remedy = f"run: optuna storage upgrade --storage '{shown}'" if known else "install a newer Optuna"
    return StorageUrlError(
        f"Optuna's own tables in {shown} have the schema {current}, and Optuna {optuna.__version__} uses {head}: "
        f"{remedy}"
    )


def _revision(database: Database) -> str | None:
    """Return the schema's revision; None if a table is missing."""

    def read() -> str | None:
        with database.engine.connect() as connection:
            if not {*models.BaseModel.metadata.tables, _VERSION_TABLE} <= set(inspect(connection).get_table_names()):
                return None
            return _stamped(connection)

    return retrying(read, database=database.shown, limit_s=database.retry_limit_s)


def _checked(database: Database, newest: str | None) -> RDBStorage:
    def look() -> None:
        with database.engine.connect() as connection:
            refuse_unusable_tables(connection, shown=database.shown)

    retrying(look, database=database.shown, limit_s=database.retry_limit_s)

    def attempt() -> tuple[RDBStorage, str, str]:
        try:
            rdb = RDBStorage(
                database.url.render_as_string(hide_password=False),
                engine_kwargs=engine_options(database.url),
                skip_compatibility_check=True,  # checked below, where connections are closed on failure
            )
            return rdb, rdb.get_current_version(), newest or rdb.get_head_version()
        except (DBAPIError, optuna.exceptions.StorageInternalError) as error:
            if is_transient(error):
                raise
            text = f"The storage '{database.shown}' cannot be used: {one_line_reason(error)}."
            raise StorageUrlError(text) from None

    rdb, current, head = retrying(attempt, database=database.shown, limit_s=database.retry_limit_s)
    # Drop connections that Optuna opened before our settings are installed.
    rdb.remove_session()
    rdb.engine.dispose()
    if current != head:
        raise _other_schema(current, head, shown=database.shown, known=current in rdb.get_all_versions())
    return rdb


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
