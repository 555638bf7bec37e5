"""A task of a study that one worker at a time does: its profile, its conclusion.

A worker that stands still for a minute (suspended, cut off from the database) loses its turn to another one. So what it
writes goes through ``held``: it looks under the lock of the database, by which a turn is taken, whose the turn is, and
again in each transaction, as a server that restarts frees the lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from optuna_dsat.store.database import Database
from optuna_dsat.store.heartbeat import Heartbeat

__all__ = ["Turn", "TurnLostError"]


class TurnLostError(Exception):
    """Another worker has taken the turn over; nothing was written."""


class Turn:
    """The turn of this process.

    Args:
        database: The database.
        heartbeat: Of this process.
        study_uuid: The study.
        number: The task's number, negative.
    """

    def __init__(self, database: Database, heartbeat: Heartbeat, *, study_uuid: str, number: int) -> None:
        self._database = database
        self._heartbeat = heartbeat
        self._uuid = study_uuid
        self._number = number

    @contextmanager
    def held(self, purpose: str) -> Iterator[None]:
        """Hold the turn for a block, which nobody can take over meanwhile; keep it brief and never nest it.

        Args:
            purpose: Purpose as a verb phrase ("store a round"), for the error message on a timeout.

        Raises:
            TurnLostError: If it is another worker's by now.
            StorageError: If the database failed.
        """
        with self._database.exclusive(purpose):
            if not self._heartbeat.is_own(self._uuid, self._number):
                raise TurnLostError
            with self._database.fenced(self._require):
                yield

    def _require(self, connection: Connection) -> None:
        if not self._heartbeat.stays_own(connection, self._uuid, self._number):
            raise TurnLostError
