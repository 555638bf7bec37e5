"""A look at a database that changes nothing in it, not even SQLite's journal mode."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from optuna_dsat.errors import StorageUrlError, StudyConflictError
from optuna_dsat.store.database import engine_options
from optuna_dsat.store.migrate import VERSION_TABLE
from optuna_dsat.store.optuna_tables import refuse_unusable_tables
from optuna_dsat.store.retry import one_line_reason
from optuna_dsat.store.urls import display_url, parse_url

__all__ = ["has_our_tables", "refuse_others_database"]


def has_our_tables(url: str) -> bool:
    """Return whether a database that exists was made by optuna-dsat; True where it cannot be read, too.

    Args:
        url: As of ``Store.open``, which says what is wrong with one that cannot be read.

    Raises:
        StorageUrlError: As ``parse_url``.
    """
    try:
        with _reading(parse_url(url)) as connection:
            return inspect(connection).has_table(VERSION_TABLE)
    except (DBAPIError, OSError):
        return True


def refuse_others_database(url: str, name: str) -> None:
    """Refuse a database without our tables in which a search could not make them, or could not make its study.

    Args:
        url: As of ``Store.open``.
        name: Name of the study.

    Raises:
        StorageUrlError: If its tables are another application's, or Optuna's in a schema that is not this Optuna's.
        StudyConflictError: If Optuna has a study of this name there; a search would not take it over.
    """
    try:
        with _reading(parse_url(url)) as connection:
            refuse_unusable_tables(connection, shown=display_url(url))
            if not inspect(connection).has_table("studies"):
                return
            found = connection.execute(text("SELECT 1 FROM studies WHERE study_name = :name"), {"name": name}).first()
    except (DBAPIError, OSError) as error:
        raise StorageUrlError(f"The storage '{display_url(url)}' cannot be opened: {one_line_reason(error)}.") from None
    if found is not None:
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
