"""Stored launches and their measured steps, which reports and exports read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from optuna_dsat.launch.protocol import LaunchReport, is_launch_id
from optuna_dsat.runtime.events import Event, StepMeasured
from optuna_dsat.runtime.files import MESSAGE_CHARS, TEXT_CHARS, shortened, storable
from optuna_dsat.store.tables import LaunchRow, StepRow, insert_or_update

__all__ = ["StoredLaunch", "read_launches", "read_step_times", "read_steps", "record_launch", "record_steps"]

_MEASURED = [field_.name for field_ in fields(StepMeasured) if field_.name in StepRow.__table__.columns]
"""Fields of a step's event that are stored."""


@dataclass(frozen=True, kw_only=True)
class StoredLaunch:
    """A finished launch, as recorded."""

    report: LaunchReport
    trial_number: int | None
    """None for a launch without a trial."""
    purpose: str
    attempt: int
    """0 for the first launch of a configuration."""


def record_launch(
    session: Session,
    study_uuid: str,
    report: LaunchReport,
    *,
    trial_number: int | None,
    purpose: str,
    attempt: int,
) -> None:
    """Store the report of a finished launch; a second report of the same launch replaces the first."""
    row = {
        **report.to_json(),
        "study_uuid": study_uuid,
        "trial_number": trial_number,
        "purpose": purpose,
        "attempt": attempt,
        "outcome": report.outcome.value,
        "message": shortened(storable(report.message), MESSAGE_CHARS),
        "error_excerpt": shortened(storable(report.error_excerpt), TEXT_CHARS),
    }
    insert_or_update(session, LaunchRow, [row])


def record_steps(session: Session, study_uuid: str, launch_id: str, events: Iterable[Event]) -> None:
    """Store the ``StepMeasured`` events of a launch; other kinds of events are ignored."""
    measured = {(event.rank, event.step): event for event in events if isinstance(event, StepMeasured)}
    rows = [
        {
            "study_uuid": study_uuid,
            "launch_id": launch_id,
            **{name: getattr(event, name) for name in _MEASURED},
            "loss": None if event.loss is None or not math.isfinite(event.loss) else event.loss,
        }
        for event in measured.values()
    ]
    insert_or_update(session, StepRow, rows)


def read_launches(session: Session, study_uuid: str) -> Sequence[StoredLaunch]:
    """Return the launches of a study, the earliest first."""
    rows = session.scalars(
        select(LaunchRow).where(LaunchRow.study_uuid == study_uuid).order_by(LaunchRow.started_at, LaunchRow.launch_id)
    )
    return tuple(_launch(row) for row in rows)


def read_steps(session: Session, study_uuid: str, launch_id: str) -> Sequence[StepMeasured]:
    """Return the steps of a launch, by step and rank."""
    rows = session.scalars(
        select(StepRow)
        .where(StepRow.study_uuid == study_uuid, StepRow.launch_id == launch_id)
        .order_by(StepRow.step, StepRow.rank)
    )
    return tuple(_step(row) for row in rows)


def read_step_times(session: Session, study_uuid: str, *, from_step: int) -> Mapping[str, tuple[float, ...]]:
    """Return launch id -> seconds of each global step from ``from_step`` on, on its slowest rank, in order.

    Steps that the loss scaler skipped are left out and do not advance the step count.
    """
    rows = session.execute(
        select(StepRow.launch_id, func.max(StepRow.latency_s))
        .where(StepRow.study_uuid == study_uuid, StepRow.step - StepRow.skipped_before >= from_step, ~StepRow.skipped)
        .group_by(StepRow.launch_id, StepRow.step)
        .order_by(StepRow.launch_id, StepRow.step)
    )
    result: dict[str, list[float]] = {}
    for launch_id, latency_s in rows:
        result.setdefault(launch_id, []).append(float(latency_s))
    return {launch_id: tuple(times) for launch_id, times in result.items()}


def _launch(row: LaunchRow) -> StoredLaunch:
    """Return a stored launch.

    Raises:
        ValueError: If the row contains an invalid value; the message names it.
    """
    if not is_launch_id(row.launch_id):  # it is used as a folder name
        raise ValueError(f"launch_id is {row.launch_id[:60]!r}")
    stored = {field_.name: getattr(row, field_.name) for field_ in fields(LaunchReport)}
    report = LaunchReport.from_json({**stored, "conditions": row.conditions or {}})
    return StoredLaunch(report=report, trial_number=row.trial_number, purpose=row.purpose, attempt=row.attempt)


def _step(row: StepRow) -> StepMeasured:
    return StepMeasured(**{name: getattr(row, name) for name in _MEASURED})
