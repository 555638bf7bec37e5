"""Trials as the rows of one flat table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["columns_of", "flat_rows"]

_COLUMNS = (
    "number",
    "state",
    "outcome",
    "value",
    "confirmed_value",
    "confirmed_low",
    "confirmed_high",
    "rounds",
    "speed_up",
    "handed_over",
    "configuration",
    "attempts",
    "peak_memory_bytes",
    "message",
)


def flat_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without dictionaries in them: parameters and metrics as ``param:NAME`` and ``metric:NAME``.

    Args:
        rows: As ``optuna_dsat.study.result.trial_row`` makes them.

    Returns:
        Rows that all have the same keys in the same order; configs are left out.
    """
    params = sorted({key for row in rows for key in row["params"]})
    metrics = sorted({key for row in rows for key in row["metrics"]})
    return [
        {
            **{name: row[name] for name in _COLUMNS},
            **{f"param:{key}": row["params"].get(key) for key in params},
            **{f"metric:{key}": row["metrics"].get(key) for key in metrics},
        }
        for row in rows
    ]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the columns of ``flat_rows``; those of every table if there are no rows."""
    return tuple(rows[0]) if rows else _COLUMNS
