"""Rows of a database checked against their columns: SQLite keeps any value in any column."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import JSON, ColumnElement

from optuna_dsat.store.tables import Base

__all__ = ["check_row", "wrong_value"]

_SHOWN_CHARS = 60


def check_row(row: Base) -> None:
    """Check that a row holds what its columns are for.

    Raises:
        ValueError: Names the column and its value.
    """
    for column in row.__table__.columns:
        value = getattr(row, column.key)
        if not _fits(value, column):
            raise wrong_value(column.key, value)


def wrong_value(name: str, value: object) -> ValueError:
    """Return the error on a stored value that is not what it must be."""
    return ValueError(f"{name} is {repr(value)[:_SHOWN_CHARS]}")


def _fits(value: Any, column: ColumnElement[Any]) -> bool:
    if value is None:
        return bool(getattr(column, "nullable", False))
    if isinstance(column.type, JSON):
        return isinstance(value, dict | list)
    kind = column.type.python_type
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind)
