"""Records of studies, next to Optuna's, and stored measurements: profiles, launches, steps."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage
from optuna.storages._rdb.models import StudyModel, StudyUserAttributeModel
from optuna.study import StudyDirection
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from optuna_dsat.errors import StudyConflictError, UsageError
from optuna_dsat.launch.protocol import LaunchReport, is_launch_id
from optuna_dsat.runtime.events import Event, StepMeasured
from optuna_dsat.runtime.files import MESSAGE_CHARS, TEXT_CHARS, shortened, storable
from optuna_dsat.store.database import Database
from optuna_dsat.store.tables import (
    ClaimRow,
    HeartbeatRow,
    LaunchRow,
    ProfileRow,
    StepRow,
    StudyRow,
    insert_or_skip,
    insert_or_update,
)
from optuna_dsat.version import __version__

STUDY_UUID = "dsat_study_uuid"
"""User attribute of the Optuna study with the UUID by which our rows refer to it."""

_STUDY_TABLES = (StepRow, LaunchRow, ClaimRow, HeartbeatRow)


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """A stored study."""

    uuid: str
    name: str
    spec: Mapping[str, Any]
    """The validated spec, as JSON values."""
    created_at: float
    """Unix time."""
    versions: Mapping[str, str]
    """Package -> version at creation; also ``cuda``, ``driver``, ``clocks`` and ``commit`` if they are known."""


class Registry:
    """Creates, finds, lists and deletes studies: this part of a store."""

    _database: Database
    storage: BaseStorage

    def create_study(
        self,
        name: str,
        spec: Mapping[str, Any],
        *,
        direction: str = "maximize",
        versions: Mapping[str, str] | None = None,
    ) -> StudyRecord:
        """Create a study from a spec (JSON values only); return the study of this name if there is one, as it is.

        Raises:
            StudyConflictError: If the study of this name was not created by optuna-dsat.
        """
        wanted = json.loads(json.dumps(spec, allow_nan=False))
        better = StudyDirection[direction.upper()]
        return self._database.exclusively(
            "create a study", lambda: self._create_locked(name, wanted, better, versions or {})
        )

    def _create_locked(
        self, name: str, wanted: dict[str, Any], direction: StudyDirection, versions: Mapping[str, str]
    ) -> StudyRecord:
        existing = self.find_study(name)
        if existing is not None:
            return existing
        study_id = self._optuna_study(name, direction)
        record = StudyRecord(
            uuid=str(uuid.uuid4()),
            name=name,
            spec=wanted,
            created_at=time.time(),
            versions={"optuna-dsat": __version__, "optuna": optuna.__version__, **versions},
        )
        self._database.run(lambda session: insert_or_skip(session, StudyRow, [asdict(record)]))
        self.storage.set_study_user_attr(study_id, STUDY_UUID, record.uuid)
        return record

    def _optuna_study(self, name: str, direction: StudyDirection) -> int:
        """Create the Optuna study, or adopt an empty study left by a process that was killed while creating it."""
        try:
            return self.storage.create_new_study([direction], name)
        except DuplicatedStudyError:
            study_id = self.storage.get_study_id_from_name(name)
        empty = not self.storage.get_all_trials(study_id, deepcopy=False)
        unmarked = not self.storage.get_study_user_attrs(study_id)
        if not (empty and unmarked and self.storage.get_study_directions(study_id) == [direction]):
            raise StudyConflictError(
                f"The database has a study '{name}' that optuna-dsat did not make: choose another name with --study."
            )
        return study_id

    def find_study(self, name: str) -> StudyRecord | None:
        """Return the study of this name; None if it does not exist or was not created by optuna-dsat."""
        study_uuid = self._uuids(name).get(name)
        if study_uuid is None:
            return None
        return self._database.run(lambda session: _record(session, study_uuid, name), read_only=True)

    def update_spec(self, study_uuid: str, spec: Mapping[str, Any]) -> None:
        """Replace a study's spec, e.g. for a new budget; the caller must keep settings that affect comparability.

        Raises:
            UsageError: If the study does not exist.
        """
        text = json.dumps(spec, allow_nan=False)

        def work(session: Session) -> None:
            row = session.get(StudyRow, study_uuid)
            if row is None:
                raise UsageError(f"There is no study {study_uuid} in {self._database.shown}.")
            row.spec = json.loads(text)

        self._database.run(work)

    def list_studies(self) -> Sequence[StudyRecord]:
        """Return all studies created by optuna-dsat, the earliest first."""
        uuids = self._uuids()

        def read(session: Session) -> Sequence[StudyRecord]:
            records = (_record(session, study_uuid, name) for name, study_uuid in uuids.items())
            return tuple(record for record in records if record is not None)

        return self._database.run(read, read_only=True)

    def delete_study(self, name: str) -> None:
        """Delete a study with all its trials, launches, steps and claims; its profile is kept.

        Raises:
            UsageError: If the study does not exist or was not created by optuna-dsat.
        """
        begun: list[str] = []

        def work() -> None:
            record = self.find_study(name)
            if record is None and not begun:
                raise UsageError(f"There is no study '{name}' in {self._database.shown} (see `optuna-dsat studies`).")
            if record is not None:
                begun.append(record.uuid)
                self.storage.delete_study(self.storage.get_study_id_from_name(name))
            self._database.run(lambda session: _delete_rows(session, begun))

        self._database.exclusively("delete a study", work)

    def collect_orphans(self) -> None:
        """Delete rows of studies that were deleted with Optuna's own tools."""

        def work() -> None:
            alive = set(self._uuids().values())

            def clean(session: Session) -> None:
                known: set[str] = set(session.scalars(select(StudyRow.uuid)))
                for model in _STUDY_TABLES:
                    known.update(session.scalars(select(model.study_uuid).distinct()))
                _delete_rows(session, sorted(known - alive))

            self._database.run(clean)

        self._database.exclusively("clean up after deleted studies", work)

    def _uuids(self, name: str | None = None) -> dict[str, str]:
        """Return name -> UUID of all studies created by optuna-dsat, or of the named study, the earliest first."""
        query = (
            select(StudyModel.study_name, StudyUserAttributeModel.value_json)
            .join(StudyUserAttributeModel, StudyUserAttributeModel.study_id == StudyModel.study_id)
            .where(StudyUserAttributeModel.key == STUDY_UUID)
            .order_by(StudyModel.study_id)
        )
        if name is not None:
            if storable(name) != name:  # cannot be queried in any database
                return {}
            query = query.where(StudyModel.study_name == name)
        rows = self._database.run(lambda session: session.execute(query).all(), read_only=True)
        return {study: text.strip('"') for study, text in rows}


def _record(session: Session, study_uuid: str, name: str) -> StudyRecord | None:
    """Return a study's record; None if it has no row."""
    row = session.get(StudyRow, study_uuid)
    if row is None:
        return None
    versions = {str(package): str(version) for package, version in row.versions.items()}
    return StudyRecord(uuid=row.uuid, name=name, spec=row.spec, created_at=row.created_at, versions=versions)


def _delete_rows(session: Session, uuids: Sequence[str]) -> None:
    for study_uuid in uuids:
        for model in _STUDY_TABLES:
            session.execute(delete(model).where(model.study_uuid == study_uuid))
        session.execute(delete(StudyRow).where(StudyRow.uuid == study_uuid))


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


class Measurements:
    """Stores and reads profiles, launches and steps: this part of a store."""

    _database: Database

    def find_profile(self, fingerprint: str) -> Mapping[str, Any] | None:
        """Return the profile with this fingerprint, of any study, or None.

        A fingerprint is the key of script, arguments, config outside the knobs, hardware and versions.
        """
        query = select(ProfileRow.profile).where(ProfileRow.fingerprint == fingerprint)
        return self._database.run(lambda session: session.scalar(query), read_only=True)

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
        rows = self._database.run(lambda session: session.scalars(query).all(), read_only=True)
        return tuple(StepMeasured(**{name: getattr(row, name) for name in _MEASURED}) for row in rows)

    def step_times(self, study_uuid: str, *, from_step: int) -> Mapping[str, tuple[float, ...]]:
        """Return launch id -> seconds of each global step from ``from_step`` on, of a rank on average, in order.

        Steps that the loss scaler skipped are left out and do not advance the step count.
        """
        counted = (StepRow.study_uuid == study_uuid, StepRow.step - StepRow.skipped_before >= from_step)
        query = (
            select(StepRow.launch_id, func.avg(StepRow.latency_s))
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
    report = LaunchReport.from_json(stored)
    return StoredLaunch(report=report, trial_number=row.trial_number, purpose=row.purpose, attempt=row.attempt)
