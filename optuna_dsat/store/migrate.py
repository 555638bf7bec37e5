"""The schema of our tables: which version a database has, and bringing it to ours.

The migrations lie in the package's ``migrations`` folder, in a checkout in ``alembic``. They are run by
alembic inside this process, on our own connection and with a version table of our own; logging is left as it
is.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from alembic.command import upgrade as alembic_upgrade
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from optuna_dsat.errors import StorageUrlError
from optuna_dsat.store.database import Database
from optuna_dsat.store.retry import retrying

__all__ = [
    "VERSION_TABLE",
    "SchemaState",
    "check",
    "current",
    "head",
    "migrations_path",
    "require_usable",
    "upgrade",
]

VERSION_TABLE = "dsat_alembic_version"
"""Optuna owns ``alembic_version``."""


class SchemaState(StrEnum):
    """How a database's schema stands to the one this version of optuna-dsat uses."""

    NEW = "new"
    """Our tables are not there yet."""
    CURRENT = "current"
    OLDER = "older"
    NEWER = "newer"


def migrations_path() -> Path:
    """Return the folder of the migrations: the installed package's, else the checkout's."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "alembic"


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def head() -> str:
    """Return the revision that this version of optuna-dsat uses."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    if revision is None:
        raise FileNotFoundError(f"There are no migrations in {migrations_path()}: optuna-dsat is not installed whole.")
    return revision


def current(database: Database) -> str | None:
    """Return the revision of a database, None where our tables are not there yet."""

    def read() -> str | None:
        with database.engine.connect() as connection:
            options = {"version_table": VERSION_TABLE}
            return MigrationContext.configure(connection, opts=options).get_current_revision()

    return retrying(read, database=database.shown, limit_s=database.retry_limit_s)


def check(database: Database) -> SchemaState:
    """Tell how a database's schema stands to ours."""
    revision = current(database)
    if revision is None:
        return SchemaState.NEW
    if revision == head():
        return SchemaState.CURRENT
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    return SchemaState.OLDER if revision in known else SchemaState.NEWER


def require_usable(database: Database) -> None:
    """Refuse a database that is older or newer than this version of optuna-dsat.

    Raises:
        StorageUrlError: With the command that upgrades an older one; a newer one needs a newer optuna-dsat.
    """
    state = check(database)
    if state is SchemaState.OLDER:
        raise StorageUrlError(
            f"The database {database.shown} was made by an older optuna-dsat "
            f"(schema {current(database)}, this version uses {head()}). "
            f"Stop its workers and run: optuna-dsat db upgrade --storage '{database.shown}'"
        )
    if state is SchemaState.NEWER:
        raise StorageUrlError(
            f"The database {database.shown} was made by a newer optuna-dsat "
            f"(schema {current(database)}, this version uses {head()}): install that version or a later one."
        )


def upgrade(database: Database) -> str:
    """Create our tables or bring them to this version's schema, one process at a time.

    Returns:
        The revision the database has now.

    Raises:
        StorageUrlError: The database is newer than this version.
        StorageError: The database failed.
    """
    with database.exclusive("upgrade the tables"):
        return upgrade_locked(database)


def upgrade_locked(database: Database) -> str:
    """Do what ``upgrade`` does; the caller holds the database's lock."""
    if check(database) is SchemaState.NEWER:
        require_usable(database)

    def work() -> None:
        with database.engine.connect() as connection:
            alembic_upgrade(_config(connection), "head")

    retrying(work, database=database.shown, limit_s=database.retry_limit_s)
    return head()
