"""Our tables, beside Optuna's in the same database.

Names begin with ``dsat_``. Rows refer to a study by a UUID of our own (the Optuna study carries it as the
user attribute ``dsat_study_uuid``) and to a trial by its number. There are no foreign keys to Optuna's
tables: on Postgres they would make Optuna's own ``delete-study`` fail, and on SQLite the identifiers of a
deleted study are given out again.

Primary keys are natural keys, so that writing a row a second time (after an acknowledgement was lost) changes
nothing. Times are Unix times in seconds, durations are in seconds, sizes in bytes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, Index, Integer, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = ["KEY_LENGTH", "Base", "ClaimRow", "HeartbeatRow", "LaunchRow", "ProfileRow", "StepRow", "StudyRow"]

KEY_LENGTH = 255
"""Longest name or key that is stored as it is."""

_UUID = String(36)
_KEY = String(KEY_LENGTH)
_JSON = JSON(none_as_null=True)


class Base(DeclarativeBase):
    """Base of our models; its metadata holds our tables and no others."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class StudyRow(Base):
    """A study: what it takes to resume it."""

    __tablename__ = "dsat_studies"

    uuid: Mapped[str] = mapped_column(_UUID, primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    """Name at creation. Not unique here: Optuna's table decides which study bears a name now."""
    spec: Mapped[dict[str, Any]] = mapped_column(_JSON)
    """The validated spec."""
    created_at: Mapped[float] = mapped_column(Float)
    versions: Mapped[dict[str, Any]] = mapped_column(_JSON)
    """Versions of the packages that created it."""


class ProfileRow(Base):
    """What a profile launch taught; it outlives its study and serves the next one on the same model."""

    __tablename__ = "dsat_profiles"

    fingerprint: Mapped[str] = mapped_column(_KEY, primary_key=True)
    profile: Mapped[dict[str, Any]] = mapped_column(_JSON)
    study_uuid: Mapped[str] = mapped_column(_UUID)
    """The study that measured it, which may be gone."""
    created_at: Mapped[float] = mapped_column(Float)


class LaunchRow(Base):
    """A launch that is over."""

    __tablename__ = "dsat_launches"

    study_uuid: Mapped[str] = mapped_column(_UUID, primary_key=True)
    launch_id: Mapped[str] = mapped_column(_KEY, primary_key=True)
    trial_number: Mapped[int | None] = mapped_column(Integer)
    """None for a launch that belongs to no trial (a profile, a confirmation)."""
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


class StepRow(Base):
    """One optimizer step of one rank."""

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


class ClaimRow(Base):
    """The right of one trial to run a configuration; the primary key makes a second one impossible."""

    __tablename__ = "dsat_claims"

    study_uuid: Mapped[str] = mapped_column(_UUID, primary_key=True)
    config_key: Mapped[str] = mapped_column(_KEY, primary_key=True)
    trial_number: Mapped[int] = mapped_column(Integer)
    worker: Mapped[str] = mapped_column(String(KEY_LENGTH))
    """Host and process that claimed it, for people."""
    claimed_at: Mapped[float] = mapped_column(Float)

    __table_args__ = (Index(None, "study_uuid", "trial_number"),)


class HeartbeatRow(Base):
    """The last sign of life of the worker that runs a trial. It is deleted when the trial is over."""

    __tablename__ = "dsat_heartbeats"

    study_uuid: Mapped[str] = mapped_column(_UUID, primary_key=True)
    trial_number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    beat_at: Mapped[float] = mapped_column(Float)
    """Unix time by the clock of the database server, so that the workers' clocks need not agree."""
    worker: Mapped[str] = mapped_column(String(KEY_LENGTH))
    """Host and process, for people; empty where a worker saw the trial run without any heartbeat."""
    machine: Mapped[str] = mapped_column(String(KEY_LENGTH))
    """What must be equal for ``pid`` to mean anything: boot of the machine and process namespace."""
    pid: Mapped[int] = mapped_column(Integer)
    pid_started_at: Mapped[float] = mapped_column(Float)
