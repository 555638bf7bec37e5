"""Stored profiles, which later studies of the same model reuse."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from optuna_dsat.store.tables import ProfileRow, insert_or_update

__all__ = ["StoredProfile", "find_profile", "save_profile"]


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


def find_profile(session: Session, fingerprint: str) -> StoredProfile | None:
    """Return the profile with this fingerprint, or None."""
    row = session.get(ProfileRow, fingerprint)
    if row is None:
        return None
    return StoredProfile(
        fingerprint=row.fingerprint, profile=row.profile, study_uuid=row.study_uuid, created_at=row.created_at
    )


def save_profile(session: Session, fingerprint: str, profile: Mapping[str, Any], *, study_uuid: str) -> None:
    """Store a profile; replaces a profile with the same fingerprint."""
    row = {
        "fingerprint": fingerprint,
        "profile": dict(profile),
        "study_uuid": study_uuid,
        "created_at": time.time(),
    }
    insert_or_update(session, ProfileRow, [row])
