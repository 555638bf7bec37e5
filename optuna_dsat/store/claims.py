"""Claims: at most one trial of a study runs a configuration, with any number of workers."""

from __future__ import annotations

import hashlib
import time

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from optuna_dsat.store.tables import KEY_LENGTH, ClaimRow
from optuna_dsat.store.upsert import insert_or_skip

__all__ = ["claim", "release_claim", "release_trial"]


def _stored(config_key: str) -> str:
    """Return the key as stored; long keys are replaced by their digest because index entries are limited in length."""
    if len(config_key) <= KEY_LENGTH:
        return config_key
    return "sha256:" + hashlib.sha256(config_key.encode()).hexdigest()


def claim(session: Session, study_uuid: str, config_key: str, trial_number: int, *, worker: str) -> bool:
    """Claim a configuration for a trial.

    Args:
        session: A session in a transaction.
        study_uuid: The study.
        config_key: Canonical key of the configuration.
        trial_number: The trial that claims it.
        worker: Host and process, for display only.

    Returns:
        Whether the trial holds the claim, also if it held it before (the call is idempotent).
    """
    insert_or_skip(
        session,
        ClaimRow,
        [
            {
                "study_uuid": study_uuid,
                "config_key": _stored(config_key),
                "trial_number": trial_number,
                "worker": worker,
                "claimed_at": time.time(),
            }
        ],
    )
    return _owner(session, study_uuid, config_key) == trial_number


def _owner(session: Session, study_uuid: str, config_key: str) -> int | None:
    """Return the number of the trial that holds the claim; None if none does."""
    return session.scalar(
        select(ClaimRow.trial_number).where(
            ClaimRow.study_uuid == study_uuid, ClaimRow.config_key == _stored(config_key)
        )
    )


def release_claim(session: Session, study_uuid: str, config_key: str) -> None:
    """Release the claim on a configuration, if there is one."""
    session.execute(
        delete(ClaimRow).where(ClaimRow.study_uuid == study_uuid, ClaimRow.config_key == _stored(config_key))
    )


def release_trial(session: Session, study_uuid: str, trial_number: int) -> None:
    """Release all claims of a trial."""
    session.execute(delete(ClaimRow).where(ClaimRow.study_uuid == study_uuid, ClaimRow.trial_number == trial_number))
