"""Optuna's own tables in a database: created where they are missing, refused in another schema than this Optuna's."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import optuna
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _VersionManager
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import scoped_session, sessionmaker

from optuna_dsat.errors import StorageUrlError
from optuna_dsat.store.database import Database, engine_options, install_events
from optuna_dsat.store.retry import is_transient, one_line_reason, retrying, tell_lost_commits
from optuna_dsat.store.revisions import newest_revision

__all__ = ["open_optuna_tables"]

_VERSION_TABLE = "alembic_version"


class _ReadyTables(RDBStorage):
    """Tables that are all there in the newest schema.

    ``RDBStorage`` finds that out by Alembic, whose import takes longer than Optuna's: here one statement did.

    Args:
        database: The database.
    """

    def __init__(self, database: Database) -> None:
        # All that the constructor of RDBStorage sets, but for what is of no use in an up-to-date database.
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
    """Open Optuna's tables and create missing ones; the caller holds the database's lock.

    Raises:
        StorageUrlError: If they cannot be used, or their schema is another than this Optuna's.
        StorageError: If the database failed.
    """
    newest = newest_revision(Path(optuna.storages.__file__).parent / "_rdb" / "alembic" / "versions")
    rdb = _ReadyTables(database) if newest is not None and _revision(database) == newest else _checked(database, newest)
    install_events(rdb.engine)
    database.guard(rdb.engine)
    tell_lost_commits(rdb.engine)
    return rdb


def _refuse_tables_of_others(database: Database) -> None:
    """Refuse a database in which another application has a table of a name of Optuna's."""

    def read() -> list[str]:
        with database.engine.connect() as connection:
            inspector = inspect(connection)
            present = set(inspector.get_table_names())
            if models.VersionInfoModel.__tablename__ in present:
                return []  # Optuna's, of whatever schema
            shared = [table for table in models.BaseModel.metadata.sorted_tables if table.name in present]
            return [
                table.name
                for table in shared
                if {column.name for column in table.columns}
                - {one["name"] for one in inspector.get_columns(table.name)}
            ]

    if found := retrying(read, database=database.shown, limit_s=database.retry_limit_s):
        raise StorageUrlError(
            f"The storage '{database.shown}' belongs to another application: its table '{found[0]}' is not Optuna's. "
            "Give a database of its own."
        )


def _revision(database: Database) -> str | None:
    """Return the schema's revision; None if a table is missing."""

    def read() -> str | None:
        with database.engine.connect() as connection:
            if not {*models.BaseModel.metadata.tables, _VERSION_TABLE} <= set(inspect(connection).get_table_names()):
                return None
            found = connection.execute(text(f"SELECT version_num FROM {_VERSION_TABLE}")).scalar()
            return None if found is None else str(found)

    return retrying(read, database=database.shown, limit_s=database.retry_limit_s)


def _checked(database: Database, newest: str | None) -> RDBStorage:
    _refuse_tables_of_others(database)

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
        known = current in rdb.get_all_versions()
        remedy = f"run: optuna storage upgrade --storage '{database.shown}'" if known else "install a newer Optuna"
        raise StorageUrlError(
            f"Optuna's own tables in {database.shown} have the schema {current}, and Optuna "
            f"{optuna.__version__} uses {head}: {remedy}"
        )
    return rdb
