"""Trials as the rows of a flat table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.study.confirm.measured import configuration_of
from optuna_dsat.study.confirm.verdict import Verdict
from optuna_dsat.trials import attributes

__all__ = ["columns_of", "flat_rows", "trial_row"]


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


def trial_row(trial: FrozenTrial, verdict: Verdict | None) -> dict[str, Any]:
    """Return a trial as a flat row, as ``trials`` of a result and ``optuna-dsat export`` show it.

    ``verdict`` is the verdict on its study so far; None if nothing was measured.
    """
    attrs = trial.user_attrs
    again = None if verdict is None else verdict.in_rounds(trial.number)
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "outcome": attrs.get(attributes.OUTCOME),
        "value": None if trial.values is None else trial.values[0],
        "confirmed_value": None if again is None else again.value,
        "confirmed_low": None if again is None else again.interval.low,
        "confirmed_high": None if again is None else again.interval.high,
        "rounds": 0 if again is None else again.rounds,
        "speed_up": None if again is None or again.speed_up is None else again.speed_up.value,
        "handed_over": verdict is not None and trial.number == verdict.result.number,
        "configuration": configuration_of(trial) if attributes.CONFIG in attrs else None,
        "attempts": attrs.get(attributes.ATTEMPTS),
        "peak_memory_bytes": attrs.get(attributes.PEAK_BYTES),
        "message": attrs.get(attributes.MESSAGE, attrs.get(attributes.VETOED)),
        "skipped_steps": attrs.get(attributes.SKIPPED_STEPS, 0),
        "steps_completed": attrs.get(attributes.STEPS_COMPLETED),
        "params": trial.params,
        "metrics": attrs.get(attributes.METRICS, {}),
        "config": attrs.get(attributes.CONFIG),
    }


def flat_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without dictionaries in them: parameters and metrics as ``param:NAME`` and ``metric:NAME``.

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
    """Return the names of the columns of ``flat_rows``; the columns of every table if empty."""
    return tuple(rows[0]) if rows else _COLUMNS
