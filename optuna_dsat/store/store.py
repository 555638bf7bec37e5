"""The persistent data of studies in a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Self, TypeVar

import optuna
from optuna.storages import BaseStorage, RDBStorage, get_storage
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from optuna_dsat.errors import StorageError, StorageUrlError
from optuna_dsat.store import migrate
from optuna_dsat.store.database import Database, engine_options, install_events
from optuna_dsat.store.leases import HEARTBEAT_INTERVAL_S, Heartbeat, Turn, release_trial, this_worker
from optuna_dsat.store.migrate import has_our_tables, open_optuna_tables
from optuna_dsat.store.reclaim import GRACE_S, Reclaimer
from optuna_dsat.store.registry import STUDY_UUID, Measurements, Registry
from optuna_dsat.store.retry import RETRY_LIMIT_S, RetryingStorage
from optuna_dsat.store.tables import ClaimRow, insert_or_skip
from optuna_dsat.store.urls import database_exists, display_url, parse_url

T = TypeVar("T")

_PROFILE_TASK, _CONCLUSION_TASK = -1, -2
"""Heartbeat numbers of the profile task and of the conclusion task of a study."""


class Store(Registry, Measurements):
    """An open store. Create it with ``Store.open``; close it, or use it in a ``with`` statement.

    All methods retry after transient database errors up to a limit and raise ``StorageError`` if the database stays
    unavailable or fails permanently; all may be called again after that.

    Attributes:
        storage: Storage argument of ``optuna.load_study``.
        heartbeat: Heartbeats of the trials that this process runs.
    """

    def __init__(
        self,
        database: Database,
        rdb: RDBStorage,
        *,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._database = database
        self._rdb = rdb
        self._worker = this_worker()
        self.storage: BaseStorage = RetryingStorage(
            get_storage(rdb),
            database=database.shown,
            retry_limit_s=database.retry_limit_s,
            require_present=database.require_present,
        )
        self.heartbeat = Heartbeat(database, worker=self._worker, interval_s=heartbeat_interval_s)
        self._reclaimer_of = cache(
            lambda study_uuid: Reclaimer(
                database, self.storage, study_uuid, grace_s=grace_s, interval_s=heartbeat_interval_s
            )
        )

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = True,
        retry_limit_s: float = RETRY_LIMIT_S,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        grace_s: float = GRACE_S,
    ) -> Store:
        """Open a database; create its tables if it is new, holding the database's lock.

        A URL is ``sqlite:///FILE`` or ``postgresql://USER@HOST:PORT/DATABASE``. The password may also come from the
        environment or a password file, as libpq reads them. Without ``create``, a missing SQLite file and a database of
        Optuna's alone are errors, and nothing is written. With it, rows of studies that were deleted with Optuna's
        tools are also removed; readers skip this, so that they need not wait for writers. A heartbeat is stale after
        ``grace_s``.

        Raises:
            StorageUrlError: If the URL cannot be opened, or its schema is older or newer than this version's.
            StorageError: If the database failed.
        """
        if not create and database_exists(url) and not has_our_tables(url):
            raise StorageUrlError(f"There is no study of optuna-dsat in the database {display_url(url)}.")
        database = Database(url, retry_limit_s=retry_limit_s, create=create)
        try:
            rdb = database.exclusively("create or check the tables", lambda: _usable_tables(database))
            store = cls(database, rdb, heartbeat_interval_s=heartbeat_interval_s, grace_s=grace_s)
        except BaseException:
            database.close()
            raise
        if create:
            try:
                store.collect_orphans()
            except BaseException:
                store.close()
                raise
        return store

    @property
    def url(self) -> str:
        """The storage URL for display, with the password masked."""
        return self._database.shown

    @property
    def absolute_url(self) -> str:
        """The storage URL with an absolute path, valid in every folder, with the password masked."""
        return display_url(self._database.url)

    def require_present(self) -> None:
        """Raise if the database was removed or replaced. See ``Database.require_present``."""
        self._database.require_present()

    def close(self) -> None:
        """Stop the heartbeat and close all connections."""
        self.heartbeat.close()
        self._rdb.remove_session()
        self._rdb.engine.dispose()
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def claim(self, study_uuid: str, config_key: str, trial_number: int) -> bool:
        """Claim a configuration for a trial; False if another trial holds the claim. Idempotent."""
        row = {"study_uuid": study_uuid, "config_key": config_key, "trial_number": trial_number}
        row |= {"worker": self._worker.name, "claimed_at": time.time()}
        owner = select(ClaimRow.trial_number).where(*_claim_on(study_uuid, config_key))

        def work(session: Session) -> bool:
            insert_or_skip(session, ClaimRow, [row])
            return session.scalar(owner) == trial_number

        return self._database.run(work)

    def release_claim(self, study_uuid: str, config_key: str) -> None:
        """Release the claim on a configuration, so that a later trial may run it."""
        self._database.run(lambda session: session.execute(delete(ClaimRow).where(*_claim_on(study_uuid, config_key))))

    def release_trial(self, study_uuid: str, trial_number: int) -> None:
        """Release all claims of a trial."""
        self._database.run(lambda session: release_trial(session, study_uuid, trial_number))

    def exclusively(self, purpose: str, work: Callable[[], T]) -> T:
        """Run brief, idempotent ``work`` under the database's exclusive lock and return its result; never nest it."""
        return self._database.exclusively(purpose, work)

    def finish(self, study_uuid: str, trial: optuna.Trial, work: Callable[[], None]) -> bool:
        """Finish a trial whose launch has ended by ``work`` if this worker still owns it; return whether it does.

        ``work`` stores the result and calls ``study.tell``; keep it brief. It runs again if the server released the
        lock, which reclaiming takes as well, unless the trial is already finished.
        """

        def finished() -> bool:
            if not self.heartbeat.is_own(study_uuid, trial.number):
                return False
            if not self.storage.get_trial(trial._trial_id).state.is_finished():
                work()
            return True

        return self._database.exclusively("finish a trial", finished)

    def profile_turn(self, study_uuid: str) -> AbstractContextManager[Turn | None]:
        """Try to acquire the task of measuring a study's profile, which runs on one worker at a time.

        The context yields None if another worker has it. It is released with the context, or when the process ends.
        """
        return self._turn(study_uuid, _PROFILE_TASK)

    def conclusion_turn(self, study_uuid: str) -> AbstractContextManager[Turn | None]:
        """Try to acquire the task of concluding a study; see ``profile_turn``."""
        return self._turn(study_uuid, _CONCLUSION_TASK)

    @contextmanager
    def _turn(self, study_uuid: str, task: int) -> Iterator[Turn | None]:
        if not self._reclaimer_of(study_uuid).acquire_task(self.heartbeat, task):
            yield None
            return
        try:
            yield Turn(self._database, self.heartbeat, study_uuid=study_uuid, number=task)
        except StorageError:
            with suppress(StorageError):  # already waited long enough
                self.heartbeat.remove(study_uuid, task, limit_s=0.0)
            raise
        except BaseException:
            self.heartbeat.remove(study_uuid, task)
            raise
        self.heartbeat.remove(study_uuid, task)

    def reclaim_stale(self, study: optuna.Study) -> tuple[int, ...]:
        """Fail the trials whose worker died and enqueue a copy of each; return the numbers of the failed trials."""
        return self._reclaimer(study).reclaim(study)

    def return_trial(self, study: optuna.Study, trial: optuna.Trial, *, reason: str) -> bool:
        """Fail a running trial of this process and enqueue a copy, which a resumed search runs.

        Returns:
            Whether the trial was still running.
        """
        returned = self._reclaimer(study).requeue(study, trial.number, reason=reason)
        self.heartbeat.remove(str(study.user_attrs[STUDY_UUID]), trial.number)
        return returned

    def _reclaimer(self, study: optuna.Study) -> Reclaimer:
        return self._reclaimer_of(str(study.user_attrs[STUDY_UUID]))


def _claim_on(study_uuid: str, config_key: str) -> tuple[ColumnElement[bool], ...]:
    return ClaimRow.study_uuid == study_uuid, ClaimRow.config_key == config_key


def _usable_tables(database: Database) -> RDBStorage:
    """Check our tables, create missing tables of ours and Optuna's, and return the latter; the lock is held."""
    state = migrate.require_usable(database)
    rdb = open_optuna_tables(database)
    if state is not migrate.SchemaState.CURRENT:
        migrate.upgrade(database)
    return rdb


def load_study(url: str, name: str) -> optuna.Study:
    """Return a stored study that keeps no connection open between calls, so it need not be closed.

    Raises:
        StorageUrlError: If the URL cannot be opened, or its schema is older or newer than this version's.
        StorageError: If the database failed.
        KeyError: If the study does not exist.
    """
    Store.open(url, create=False).close()  # raises if the database cannot be used
    parsed = parse_url(url)
    rdb = RDBStorage(
        parsed.render_as_string(hide_password=False),
        engine_kwargs={**engine_options(parsed), "poolclass": NullPool},
        skip_compatibility_check=True,
        skip_table_creation=True,
    )
    install_events(rdb.engine)
    return optuna.load_study(study_name=name, storage=rdb)
