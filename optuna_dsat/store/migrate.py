"""Schema version of our tables: check and upgrade.

The migrations are in the package's ``migrations`` folder, in a checkout in ``alembic``. Alembic runs them in this
process, on our own connection and with our own version table, without changing the logging configuration.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from optuna_dsat.errors import StorageUrlError
from optuna_dsat.store.database import Database
from optuna_dsat.store.retry import retrying

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
            if not inspect(connection).has_table(VERSION_TABLE):
                return None
            return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()

    return retrying(read, database=database.shown, limit_s=database.retry_limit_s)


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
            f"Stop its workers and run: optuna-dsat db upgrade --storage '{database.shown}'"
        )
    if state is SchemaState.NEWER:
        raise StorageUrlError(
            f"The database {database.shown} was made by a newer optuna-dsat "
            f"(schema {current(database)}, this version uses {head()}): install that version or a later one."
        )
    return state


def upgrade(database: Database) -> str | None:
    """Create our tables or upgrade them to this version's schema, holding the database's lock.

    Returns:
        The schema revision after the upgrade.

    Raises:
        StorageUrlError: If the schema is newer than this version's.
        StorageError: If the database failed.
    """
    return database.exclusively("upgrade the tables", lambda: upgrade_locked(database))


def upgrade_locked(database: Database) -> str | None:
    """Do the same as ``upgrade``; the caller holds the database's lock."""
    if check(database) is SchemaState.NEWER:
        require_usable(database)

    from alembic.command import upgrade as alembic_upgrade

    def work() -> None:
        with database.engine.begin() as connection:  # all or nothing: a partial schema would look like an older schema
            alembic_upgrade(_config(connection), "head")

    retrying(work, database=database.shown, limit_s=database.retry_limit_s)
    return head()
