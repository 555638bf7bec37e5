"""Heartbeats: a thread records in the database which trials this process is running.

Optuna's own heartbeat works with ``study.optimize`` only, and its thread ends at the first database error, after
which running trials count as stale. ``Heartbeat`` works with ask and tell, and continues after any error.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, Select, cast, delete, func, literal_column, select, update
from sqlalchemy.orm import Session

from optuna_dsat.runtime.process_identity import process_space, start_ticks
from optuna_dsat.store.database import Database
from optuna_dsat.store.retry import one_line_reason
from optuna_dsat.store.tables import ClaimRow, HeartbeatRow, insert_or_update


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A process on a machine."""

    name: str
    """Host and process id, for display only."""
    machine: str
    """Boot and process namespace; process numbers and starts are comparable only if equal."""
    pid: int
    pid_started_at: float
    """Clock ticks from the machine's boot to the process's start, unaffected by wall clock changes; distinguishes
    processes with the same number.
    """

    def is_dead(self) -> bool:
        """Return whether the process is known to have ended; False if it is alive or on another machine."""
        if self.machine != process_space():
            return False
        start = start_ticks(self.pid)
        if start is not None:
            return start != self.pid_started_at
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return Path(f"/proc/{self.pid}").exists()  # True for a zombie; False if hidden from this user or without /proc


def this_worker() -> Worker:
    """Return this process as a worker."""
    pid = os.getpid()
    start = start_ticks(pid)
    name = f"{socket.gethostname()}:{pid}"
    return Worker(name=name, machine=process_space(), pid=pid, pid_started_at=float(start or 0))


HEARTBEAT_INTERVAL_S = 5.0
"""Seconds between two heartbeats."""

_JOIN_S = 5.0

_logger = logging.getLogger(__name__)


def server_time(session: Session) -> float:
    """Return the Unix time in seconds by the database server's clock (for SQLite, this machine's)."""
    if session.get_bind().dialect.name == "sqlite":
        # The Unix epoch is Julian day 2440587.5 (https://www.sqlite.org/lang_datefunc.html).
        now: ColumnElement[Any] = (func.julianday("now") - literal_column("2440587.5")) * literal_column("86400.0")
    else:
        now = func.extract("epoch", func.clock_timestamp())
    return float(session.execute(select(cast(now, Float))).scalar_one())


def beat_of(session: Session, study_uuid: str, trial_number: int, *, worker: Worker) -> dict[str, Any]:
    """Return the row of a worker's heartbeat now."""
    return {
        "study_uuid": study_uuid,
        "trial_number": trial_number,
        "beat_at": server_time(session),
        "worker": worker.name,
        "machine": worker.machine,
        "pid": worker.pid,
        "pid_started_at": worker.pid_started_at,
    }


def delete_beat(session: Session, study_uuid: str, trial_number: int, *, worker: Worker | None = None) -> None:
    """Delete the heartbeat of a trial, if present: only if it belongs to ``worker``, or for None in any case."""
    whose = () if worker is None else _belongs_to(worker)
    session.execute(
        delete(HeartbeatRow).where(
            HeartbeatRow.study_uuid == study_uuid, HeartbeatRow.trial_number == trial_number, *whose
        )
    )


def _belongs_to(worker: Worker) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that select a worker's rows; names alone are not unique among identical containers."""
    return (
        HeartbeatRow.worker == worker.name,
        HeartbeatRow.machine == worker.machine,
        HeartbeatRow.pid_started_at == worker.pid_started_at,
    )


class Heartbeat:
    """Renews the heartbeats of this process's trials, so that other workers do not reclaim them.

    Its methods raise ``StorageError`` if the database failed.
    """

    def __init__(self, database: Database, *, worker: Worker, interval_s: float = HEARTBEAT_INTERVAL_S) -> None:
        self._database = database
        self._worker = worker
        self._interval_s = interval_s
        self._trials: set[tuple[str, int]] = set()
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, study_uuid: str, number: int) -> None:
        """Start the heartbeat of a trial, or of another task of a study, which has a negative number.

        The first heartbeat is stored before this returns.
        """
        key = (study_uuid, number)

        def work(session: Session) -> None:
            insert_or_update(session, HeartbeatRow, [beat_of(session, *key, worker=self._worker)])

        self._database.run(work)
        with self._guard:
            self._trials.add(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dsat-heartbeat", daemon=True)
                self._thread.start()

    def remove(self, study_uuid: str, number: int, *, limit_s: float | None = None) -> None:
        """Stop and delete a heartbeat (of a trial, after ``study.tell``) unless another worker has taken it over."""
        key = (study_uuid, number)
        with self._guard:
            self._trials.discard(key)
        self._database.run(lambda session: delete_beat(session, *key, worker=self._worker), limit_s=limit_s)

    def is_own(self, study_uuid: str, number: int) -> bool:
        """Return whether this worker still owns a trial or another task: its heartbeat is in the database.

        If not, another worker considered this worker dead, as after a suspension, and requeued the trial. The launch's
        result must then be discarded: a copy of the trial runs elsewhere.
        """
        item = self._own(study_uuid, number)
        return self._database.run(lambda session: session.scalar(item), read_only=True) is not None

    def stays_own(self, connection: Connection, study_uuid: str, number: int) -> bool:
        """Do the same as ``is_own`` in a transaction; no other worker can take it over before the transaction ends."""
        return connection.scalar(self._own(study_uuid, number).with_for_update()) is not None

    def _own(self, study_uuid: str, number: int) -> Select[int]:
        return select(HeartbeatRow.trial_number).where(
            HeartbeatRow.study_uuid == study_uuid, HeartbeatRow.trial_number == number, *_belongs_to(self._worker)
        )

    def close(self) -> None:
        """Stop the thread; heartbeats of trials that still run stay stored and become stale."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._beat()
            except Exception as error:  # noqa: BLE001 - the thread must survive any database error
                _logger.warning("No sign of life could be stored, trying on: %s.", one_line_reason(error))

    def _beat(self) -> None:
        with self._guard:
            watched = set(self._trials)
        if not watched:
            return
        self._database.run(lambda session: self._touch(session, watched))

    def _touch(self, session: Session, watched: Iterable[tuple[str, int]]) -> None:
        """Renew the heartbeats that still belong to this worker."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for study_uuid, number in watched:
            numbers[study_uuid].append(number)
        now = server_time(session)
        for study_uuid, trials in numbers.items():
            session.execute(
                update(HeartbeatRow)
                .where(
                    HeartbeatRow.study_uuid == study_uuid,
                    HeartbeatRow.trial_number.in_(trials),
                    *_belongs_to(self._worker),
                )
                .values(beat_at=now)
                .execution_options(synchronize_session=False)
            )


def release_trial(session: Session, study_uuid: str, trial_number: int) -> None:
    """Release all claims of a trial."""
    session.execute(delete(ClaimRow).where(ClaimRow.study_uuid == study_uuid, ClaimRow.trial_number == trial_number))


# A task of a study that runs on one worker at a time: its profile, its conclusion.
#
# A worker that stops for a minute (suspended, cut off from the database) loses its turn to another worker. So its
# writes go through ``held``, which checks the turn's owner under the database's lock, by which a turn is taken. It
# checks again in each transaction, because a server restart releases the lock.


class TurnLostError(Exception):
    """Another worker has taken over the turn; nothing was written."""


class Turn:
    """The turn of this process."""

    def __init__(self, database: Database, heartbeat: Heartbeat, *, study_uuid: str, number: int) -> None:
        self._database = database
        self._heartbeat = heartbeat
        self._uuid = study_uuid
        self._number = number

    @contextmanager
    def held(self, purpose: str) -> Iterator[None]:
        """Hold the turn for a block, so that no other worker can take it over; keep it brief and never nest it.

        Raises:
            TurnLostError: If another worker has taken it over.
            StorageError: If the database failed.
        """

        def require(connection: Connection) -> None:
            if not self._heartbeat.stays_own(connection, self._uuid, self._number):
                raise TurnLostError

        with self._database.exclusive(purpose):
            if not self._heartbeat.is_own(self._uuid, self._number):
                raise TurnLostError
            with self._database.fenced(require):
                yield
