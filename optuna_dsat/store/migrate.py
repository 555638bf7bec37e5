"""Schemas of a database: our tables are checked and upgraded, Optuna's created if missing, else checked.

The migrations are in the package's ``migrations`` folder, in a checkout in ``alembic``. Alembic runs them in this
process, on our own connection and with our own version table, without changing the logging configuration.
"""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Container, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import optuna
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from sqlalchemy import Connection, Inspector, create_engine, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from optuna_dsat.errors import StorageUrlError, StudyConflictError
from optuna_dsat.store.database import Database, engine_options, install_events
from optuna_dsat.store.retry import is_transient, one_line_reason, retrying, tell_lost_commits
from optuna_dsat.store.urls import display_url, parse_url

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

VERSION_TABLE = "dsat_alembic_version"
"""Version table of our schema; ``alembic_version`` is Optuna's."""


class SchemaState(StrEnum):
    """A database's schema version compared to the schema of this version of optuna-dsat."""

    NEW = "new"
    """Our tables do not exist yet."""
    CURRENT = "current"
    OLDER = "older"
    NEWER = "newer"


def migrations_path() -> Path:
    """Return the folder of the migrations: the installed package's if it exists, else the checkout's."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "alembic"


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def scripts_in(folder: Path) -> ScriptDirectory:
    """Return Alembic's reader of a folder of migrations."""
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(folder))


def head() -> str | None:
    """Return the schema revision that this version of optuna-dsat uses."""
    return scripts_in(migrations_path()).get_current_head()


def current(database: Database) -> str | None:
    """Return the schema revision of a database; None if our tables do not exist yet."""

    def read() -> str | None:
        with database.engine.connect() as connection:
            return _revision(connection, VERSION_TABLE)

    return retrying(read, database=database.shown, limit_s=database.retry_limit_s)


def _revision(connection: Connection, table: str) -> str | None:
    """Return the revision in one of Alembic's version tables; None if the table is missing or empty."""
    if not inspect(connection).has_table(table):
        return None
    return connection.execute(text(f"SELECT version_num FROM {table}")).scalar()


def check(database: Database) -> SchemaState:
    """Return how a database's schema compares to ours."""
    revision = current(database)
    if revision is None:
        return SchemaState.NEW
    if revision == head():
        return SchemaState.CURRENT
    known = {script.revision for script in scripts_in(migrations_path()).walk_revisions()}
    return SchemaState.OLDER if revision in known else SchemaState.NEWER


def require_usable(database: Database) -> SchemaState:
    """Reject a database whose schema is older or newer than this version of optuna-dsat.

    Returns:
        ``NEW`` or ``CURRENT``.

    Raises:
        StorageUrlError: If it is older (the message gives the upgrade command) or newer.
    """
    state = check(database)
    if state is SchemaState.OLDER:
        raise StorageUrlError(
            f"The database {database.shown} was made by an older optuna-dsat "
            f"(schema {current(database)}, this version uses {head()}). "
            f"Stop its workers and run: optuna-dsat db upgrade --storage {shlex.quote(database.shown)}"
        )
    if state is SchemaState.NEWER:
        raise StorageUrlError(
            f"The database {database.shown} was made by a newer optuna-dsat "
            f"(schema {current(database)}, this version uses {head()}): install that version or a later one."
        )
    return state


def upgrade(database: Database) -> None:
    """Create our tables or upgrade them to this version's schema; the caller holds the database's lock.

    Raises:
        StorageUrlError: If the schema is newer than this version's.
        StorageError: If the database failed.
    """
    if check(database) is SchemaState.NEWER:
        require_usable(database)

    from alembic.command import upgrade as alembic_upgrade

    def work() -> None:
        with database.engine.begin() as connection:  # all or nothing: a partial schema would look like an older schema
            alembic_upgrade(_config(connection), "head")

    retrying(work, database=database.shown, limit_s=database.retry_limit_s)


_OPTUNAS_VERSION_TABLE = "alembic_version"
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
    current = _revision(connection, _OPTUNAS_VERSION_TABLE)
    if models.VersionInfoModel.__tablename__ not in present:  # otherwise Optuna's, in any schema
        if foreign := (current and _OPTUNAS_VERSION_TABLE) or _foreign_table(inspector, present):
            raise StorageUrlError(
                f"The storage '{shown}' belongs to another application: its table '{foreign}' is not Optuna's. "
                "Give another database."
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


def _other_schema(current: str, head: str, *, shown: str) -> StorageUrlError:
    known = current in {script.revision for script in scripts_in(_MIGRATIONS).walk_revisions()}
    remedy = f"run: optuna storage upgrade --storage {shlex.quote(shown)}" if known else "install a newer Optuna"
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
