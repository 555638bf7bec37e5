"""SQLAlchemy models of our tables, which share a database with Optuna's.

Table names begin with ``dsat_``. Rows refer to a study by our own UUID (stored in the Optuna study's user attribute
``dsat_study_uuid``) and to a trial by its number. The tables have no foreign keys to Optuna's tables: on PostgreSQL
they would make Optuna's ``delete-study`` fail, and SQLite reuses the identifiers of deleted studies.

Primary keys are natural keys, so that writing a row again (after a lost acknowledgement) is idempotent. Times are
Unix times in seconds, durations are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import JSON, BigInteger, Boolean, Float, Index, Integer, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

KEY_LENGTH = 255
"""Maximum length of a stored name or key, in characters."""

_UUID = String(36)
_KEY = String(KEY_LENGTH)
_JSON = JSON(none_as_null=True)


class Base(DeclarativeBase):
    """Base of our models; its metadata contains our tables only."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class StudyRow(Base):
    """A study and the spec that resuming it needs."""

    __tablename__ = "dsat_studies"

    uuid: Mapped[str] = mapped_column(_UUID, primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    """Name at creation. Not unique: Optuna's table determines which study has a name now."""
    spec: Mapped[dict[str, Any]] = mapped_column(_JSON)
    """The validated spec."""
    created_at: Mapped[float] = mapped_column(Float)
    versions: Mapped[dict[str, Any]] = mapped_column(_JSON)
    """Package -> version at creation."""


class ProfileRow(Base):
    """Result of a profile launch; kept when its study is deleted, for later studies of the same model."""

    __tablename__ = "dsat_profiles"

    fingerprint: Mapped[str] = mapped_column(_KEY, primary_key=True)
    profile: Mapped[dict[str, Any]] = mapped_column(_JSON)
    study_uuid: Mapped[str] = mapped_column(_UUID)
    """The study that measured it, which may have been deleted."""
    created_at: Mapped[float] = mapped_column(Float)


class LaunchRow(Base):
    """A finished launch."""

    __tablename__ = "dsat_launches"

    study_uuid: Mapped[str] = mapped_column(_UUID, primary_key=True)
    launch_id: Mapped[str] = mapped_column(_KEY, primary_key=True)
    trial_number: Mapped[int | None] = mapped_column(Integer)
    """None for a launch without a trial (a profile, a confirmation)."""
    purpose: Mapped[str] = mapped_column(String(32))
    attempt: Mapped[int] = mapped_column(Integer)
    """0 for the first launch of a configuration."""
    outcome: Mapped[str] = mapped_column(String(32))
    message: Mapped[str] = mapped_column(Text)
    command: Mapped[list[str]] = mapped_column(_JSON)
    host: Mapped[str] = mapped_column(String(KEY_LENGTH))
    devices: Mapped[list[int]] = mapped_column(_JSON)
    pids: Mapped[list[int]] = mapped_column(_JSON)
    started_at: Mapped[float] = mapped_column(Float)
    startup_s: Mapped[float] = mapped_column(Float)
    measured_s: Mapped[float] = mapped_column(Float)
    exit_s: Mapped[float] = mapped_column(Float)
    exit_code: Mapped[int | None] = mapped_column(Integer)
    error_excerpt: Mapped[str] = mapped_column(Text)
    missing_bytes: Mapped[int | None] = mapped_column(BigInteger)
    log_path: Mapped[str] = mapped_column(Text)
    conditions: Mapped[dict[str, Any]] = mapped_column(_JSON)
    root: Mapped[str] = mapped_column(String(KEY_LENGTH))
    afresh: Mapped[bool] = mapped_column(Boolean)


class StepRow(Base):
    """An optimizer step of a rank."""

    __tablename__ = "dsat_steps"

    study_uuid: Mapped[str] = mapped_column(_UUID, primary_key=True)
    launch_id: Mapped[str] = mapped_column(_KEY, primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    time: Mapped[float] = mapped_column(Float)
    latency_s: Mapped[float] = mapped_column(Float)
    forward_s: Mapped[float] = mapped_column(Float)
    backward_s: Mapped[float] = mapped_column(Float)
    step_s: Mapped[float] = mapped_column(Float)
    samples: Mapped[int] = mapped_column(BigInteger)
    observed_micro_batch: Mapped[int | None] = mapped_column(BigInteger)
    loss: Mapped[float | None] = mapped_column(Float)
    peak_allocated_bytes: Mapped[int] = mapped_column(BigInteger)
    peak_reserved_bytes: Mapped[int] = mapped_column(BigInteger)
    rss_bytes: Mapped[int] = mapped_column(BigInteger)
    skipped: Mapped[bool] = mapped_column(Boolean)
    """Whether the loss scaler skipped it."""
    skipped_before: Mapped[int] = mapped_column(Integer)
    """Earlier steps of the launch that were skipped; ``step`` minus this is its number among the counted steps."""
    elements: Mapped[int] = mapped_column(BigInteger)
    """Elements of the inputs; 0 if not observed."""
    elements_are_tokens: Mapped[bool] = mapped_column(Boolean)


class ClaimRow(Base):
    """Exclusive right of a trial to run a configuration, enforced by the primary key."""

    __tablename__ = "dsat_claims"

    study_uuid: Mapped[str] = mapped_column(_UUID, primary_key=True)
    config_key: Mapped[str] = mapped_column(_KEY, primary_key=True)
    trial_number: Mapped[int] = mapped_column(Integer)
    worker: Mapped[str] = mapped_column(String(KEY_LENGTH))
    """Host and process that claimed it, for display only."""
    claimed_at: Mapped[float] = mapped_column(Float)

    __table_args__ = (Index(None, "study_uuid", "trial_number"),)


class HeartbeatRow(Base):
    """Latest heartbeat of the worker that runs a trial; deleted when the trial ends."""

    __tablename__ = "dsat_heartbeats"

    study_uuid: Mapped[str] = mapped_column(_UUID, primary_key=True)
    trial_number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    beat_at: Mapped[float] = mapped_column(Float)
    """Unix time by the database server's clock, so that the workers' clocks need not agree."""
    worker: Mapped[str] = mapped_column(String(KEY_LENGTH))
    """Host and process; empty if another worker added the row for a running trial without a heartbeat."""
    machine: Mapped[str] = mapped_column(String(KEY_LENGTH))
    """Boot id of the machine and process namespace, within which ``pid`` is valid."""
    pid: Mapped[int] = mapped_column(Integer)
    pid_started_at: Mapped[float] = mapped_column(Float)
    """Clock ticks from the machine's boot to the process's start."""


def insert_or_skip(session: Session, model: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, with the same columns in every row; rows whose primary key exists are skipped."""
    if rows:
        statement = _insert(session.get_bind().dialect.name, model).on_conflict_do_nothing()
        session.connection().execute(statement, [dict(row) for row in rows])


def insert_or_update(session: Session, model: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, with the same columns in every row and unique primary keys; existing rows are overwritten."""
    if rows:
        statement = _upsert(session.get_bind().dialect.name, model, tuple(rows[0]))
        session.connection().execute(statement, [dict(row) for row in rows])


@cache
def _upsert(dialect: str, model: type[Base], names: Sequence[str]) -> sqlite.Insert | postgresql.Insert:
    statement = _insert(dialect, model)
    keys = {column.name for column in statement.table.primary_key}
    changed = {name: statement.excluded[name] for name in names if name not in keys}
    return statement.on_conflict_do_update(index_elements=sorted(keys), set_=changed)


def _insert(dialect: str, model: type[Base]) -> sqlite.Insert | postgresql.Insert:
    from sqlalchemy.dialects import postgresql, sqlite

    insert = sqlite.insert if dialect == "sqlite" else postgresql.insert
    return insert(model.metadata.tables[model.__tablename__])
