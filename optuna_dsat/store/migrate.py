"""Schema version of our tables: check and upgrade.

The migrations are in the package's ``migrations`` folder, in a checkout in ``alembic``. Alembic runs them in this
process, on our own connection and with our own version table, without changing the logging configuration.
"""

from __future__ import annotations

import ast
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, inspect, text

from optuna_dsat.errors import StorageUrlError
from optuna_dsat.store.database import Database
from optuna_dsat.store.retry import retrying

if TYPE_CHECKING:
    from alembic.config import Config

__all__ = [
    "VERSION_TABLE",
    "SchemaState",
    "all_revisions",
    "check",
    "current",
    "head",
    "migrations_path",
    "newest_revision",
    "require_usable",
    "upgrade",
]

_NAMES = ("revision", "down_revision")


def newest_revision(folder: Path) -> str | None:
    """Return the only revision that no other revision builds on; None if it is not unique or a file cannot be read.

    Args:
        folder: The folder ``versions`` of the migrations.
    """
    below = _revisions_below(folder)
    newest = set(below) - set().union(*below.values())
    return newest.pop() if len(newest) == 1 else None


def all_revisions(folder: Path) -> frozenset[str]:
    """Return all revisions; empty if a file cannot be read."""
    return frozenset(_revisions_below(folder))


def _revisions_below(folder: Path) -> dict[str, set[Any]]:
    """Return revision -> the revisions that it builds on; empty if a file cannot be read."""
    result: dict[str, set[Any]] = {}
    for path in folder.glob("*.py"):
        try:
            parts = [line for line in path.read_text("utf-8").splitlines() if line.startswith(_NAMES)]
            tree = ast.parse("\n".join(parts))
        except (OSError, SyntaxError, ValueError):
            return {}
        names = {name: value for node in tree.body for name, value in _assigned(node)}
        if isinstance(names.get("revision"), str):
            before = names.get("down_revision")
            result[names["revision"]] = set(before) if isinstance(before, tuple | list) else {before}
    return result


def _assigned(node: ast.stmt) -> list[tuple[str, Any]]:
    """Return name and value of a statement that assigns a literal to a name; empty for other statements."""
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    value = getattr(node, "value", None)
    if not isinstance(target, ast.Name) or value is None:
        return []
    try:
        return [(target.id, ast.literal_eval(value))]
    except ValueError:
        return []


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


def _config(connection: Connection | None = None) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def head() -> str:
    """Return the schema revision that this version of optuna-dsat uses.

    Raises:
        FileNotFoundError: If the migrations are missing.
    """
    revision = newest_revision(migrations_path() / "versions")
    if revision is None:
        raise FileNotFoundError(f"There are no migrations in {migrations_path()}: optuna-dsat is not installed whole.")
    return revision


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
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
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


def upgrade(database: Database) -> str:
    """Create our tables or upgrade them to this version's schema, holding the database's lock.

    Returns:
        The schema revision after the upgrade.

    Raises:
        StorageUrlError: If the schema is newer than this version's.
        StorageError: If the database failed.
    """
    return database.exclusively("upgrade the tables", lambda: upgrade_locked(database))


def upgrade_locked(database: Database) -> str:
    """Do the same as ``upgrade``; the caller holds the database's lock."""
    if check(database) is SchemaState.NEWER:
        require_usable(database)

    from alembic.command import upgrade as alembic_upgrade

    def work() -> None:
        with database.engine.begin() as connection:  # all or nothing: a partial schema would look like an older schema
            alembic_upgrade(_config(connection), "head")

    retrying(work, database=database.shown, limit_s=database.retry_limit_s)
    return head()
