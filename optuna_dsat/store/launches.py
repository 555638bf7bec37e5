"""Stored measurements: profiles, launches and their steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from optuna_dsat.launch.protocol import LaunchReport, is_launch_id
from optuna_dsat.runtime.events import Event, StepMeasured
from optuna_dsat.runtime.files import MESSAGE_CHARS, TEXT_CHARS, shortened, storable
from optuna_dsat.store.database import Database
from optuna_dsat.store.tables import LaunchRow, ProfileRow, StepRow, insert_or_update

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


@dataclass(frozen=True, kw_only=True)
class StoredProfile:
    """A profile and its origin."""

    fingerprint: str
    """Key of script, arguments, config outside the knobs, hardware and versions; at most 255 characters."""
    profile: Mapping[str, Any]
    study_uuid: str
    """The study that measured it, which may have been deleted."""
    created_at: float
    """Unix time."""


class Measurements:
    """Stores and reads profiles, launches and steps: this part of a store."""

    _database: Database

    def find_profile(self, fingerprint: str) -> StoredProfile | None:
        """Return the profile with this fingerprint, of any study, or None."""
        names = [field_.name for field_ in fields(StoredProfile)]

        def read(session: Session) -> StoredProfile | None:
            row = session.get(ProfileRow, fingerprint)
            return None if row is None else StoredProfile(**{name: getattr(row, name) for name in names})

        return self._database.run(read, read_only=True)

    def save_profile(self, fingerprint: str, profile: Mapping[str, Any], *, study_uuid: str) -> None:
        """Store the result of a profile launch; replaces a profile with the same fingerprint."""
        row: dict[str, Any] = {"fingerprint": fingerprint, "profile": dict(profile), "study_uuid": study_uuid}
        row["created_at"] = time.time()
        self._database.run(lambda session: insert_or_update(session, ProfileRow, [row]))

    def record_launch(
        self, study_uuid: str, report: LaunchReport, *, trial_number: int | None, purpose: str, attempt: int
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
        self._database.run(lambda session: insert_or_update(session, LaunchRow, [row]))

    def record_steps(self, study_uuid: str, launch_id: str, events: Iterable[Event]) -> None:
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
        self._database.run(lambda session: insert_or_update(session, StepRow, rows))

    def launches(self, study_uuid: str) -> Sequence[StoredLaunch]:
        """Return the launches of a study, the earliest first."""
        query = select(LaunchRow).where(LaunchRow.study_uuid == study_uuid)
        query = query.order_by(LaunchRow.started_at, LaunchRow.launch_id)
        return self._database.run(lambda session: tuple(map(_launch, session.scalars(query))), read_only=True)

    def steps(self, study_uuid: str, launch_id: str) -> Sequence[StepMeasured]:
        """Return the steps of a launch, by step and rank."""
        query = select(StepRow).where(StepRow.study_uuid == study_uuid, StepRow.launch_id == launch_id)
        query = query.order_by(StepRow.step, StepRow.rank)
        return self._database.run(lambda session: tuple(map(_step, session.scalars(query))), read_only=True)

    def step_times(self, study_uuid: str, *, from_step: int) -> Mapping[str, tuple[float, ...]]:
        """Return launch id -> seconds of each global step from ``from_step`` on, on its slowest rank, in order.

        Steps that the loss scaler skipped are left out and do not advance the step count.
        """
        counted = (StepRow.study_uuid == study_uuid, StepRow.step - StepRow.skipped_before >= from_step)
        query = (
            select(StepRow.launch_id, func.max(StepRow.latency_s))
            .where(*counted, ~StepRow.skipped)
            .group_by(StepRow.launch_id, StepRow.step)
            .order_by(StepRow.launch_id, StepRow.step)
        )
        result: dict[str, list[float]] = {}
        for launch_id, latency_s in self._database.run(lambda session: session.execute(query).all(), read_only=True):
            result.setdefault(launch_id, []).append(float(latency_s))
        return {launch_id: tuple(times) for launch_id, times in result.items()}


def _launch(row: LaunchRow) -> StoredLaunch:
    """Return a stored launch."""
    if not is_launch_id(row.launch_id):  # it is used as a folder name
        raise ValueError(f"launch_id is {row.launch_id[:60]!r}")
    stored = {field_.name: getattr(row, field_.name) for field_ in fields(LaunchReport)}
    report = LaunchReport.from_json({**stored, "conditions": row.conditions or {}})
    return StoredLaunch(report=report, trial_number=row.trial_number, purpose=row.purpose, attempt=row.attempt)


def _step(row: StepRow) -> StepMeasured:
    return StepMeasured(**{name: getattr(row, name) for name in _MEASURED})
