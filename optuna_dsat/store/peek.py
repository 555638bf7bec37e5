"""A look at a database that changes nothing in it, not even SQLite's journal mode."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from optuna_dsat.errors import StudyConflictError
from optuna_dsat.store.migrate import VERSION_TABLE
from optuna_dsat.store.urls import parse_url

__all__ = ["has_our_tables", "refuse_foreign_study"]

_Query = Callable[[str, dict[str, Any]], Any]


def has_our_tables(url: str) -> bool:
    """Return whether a database that exists was made by optuna-dsat; True where it cannot be read, too.

    Args:
        url: As of ``Store.open``, which says what is wrong with one that cannot be read.

    Raises:
        StorageUrlError: As ``parse_url``.
    """
    parsed = parse_url(url)
    query = (
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :name"
        if parsed.get_backend_name() == "sqlite"
        else "SELECT 1 FROM information_schema.tables WHERE table_name = :name"
    )
    try:
        with _reading(parsed) as first:
            return first(query, {"name": VERSION_TABLE}) is not None
    except (sqlite3.Error, DBAPIError, OSError):
        return True


def refuse_foreign_study(url: str, name: str) -> None:
    """Refuse the name of a study that is in a database of Optuna's alone.

    Raises:
        StudyConflictError: If there is one; a search would not take it over.
    """
    try:
        with _reading(parse_url(url)) as first:
            found = first("SELECT 1 FROM studies WHERE study_name = :name", {"name": name})
    except (sqlite3.Error, DBAPIError, OSError):
        return  # not even Optuna's tables: nothing has a name yet
    if found is not None:
        raise StudyConflictError(
            f"The database has a study '{name}' that optuna-dsat did not make: choose another name with --study."
        )


@contextmanager
def _reading(url: URL) -> Iterator[_Query]:
    """Yield a function that returns the first row of a query, on a connection that cannot write."""
    if url.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(f"file:{quote(str(url.database))}?mode=ro", uri=True)) as connection:
            yield lambda query, values: connection.execute(query, values).fetchone()
        return
    engine = create_engine(url, hide_parameters=True)
    try:
        with engine.connect() as server:
            yield lambda query, values: server.execute(text(query), values).first()
    finally:
        engine.dispose()
