"""Inserts rows that may already exist, in the dialects of SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Table
from sqlalchemy.orm import Session

from optuna_dsat.store.tables import Base

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

__all__ = ["insert_or_skip", "insert_or_update"]

_ROWS_PER_STATEMENT = 500
"""SQLite accepts 32,766 parameters per statement (since 3.32); 500 rows of 17 columns stay below."""


def _insert(session: Session, table: Table) -> sqlite.Insert | postgresql.Insert:
    if session.get_bind().dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)


def _table(model: type[Base]) -> Table:
    return model.metadata.tables[model.__tablename__]


def insert_or_skip(session: Session, model: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows; rows whose primary key exists are skipped.

    Args:
        session: A session in a transaction.
        model: The table.
        rows: Column values, the same columns in every row.
    """
    table = _table(model)
    for start in range(0, len(rows), _ROWS_PER_STATEMENT):
        chunk = [dict(row) for row in rows[start : start + _ROWS_PER_STATEMENT]]
        session.execute(_insert(session, table).values(chunk).on_conflict_do_nothing())


def insert_or_update(session: Session, model: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows; rows whose primary key exists are overwritten.

    Args:
        session: A session in a transaction.
        model: The table.
        rows: Column values, the same columns in every row; primary keys are unique.
    """
    table = _table(model)
    keys = {column.name for column in table.primary_key}
    for start in range(0, len(rows), _ROWS_PER_STATEMENT):
        chunk = [dict(row) for row in rows[start : start + _ROWS_PER_STATEMENT]]
        statement = _insert(session, table).values(chunk)
        changed = {name: statement.excluded[name] for name in chunk[0] if name not in keys}
        session.execute(statement.on_conflict_do_update(index_elements=sorted(keys), set_=changed))
