"""Classifies database errors as transient or permanent, and retries work after transient errors.

A locked SQLite file, a restarting PostgreSQL server and a database that is read-only for the moment, as during a
failover, are transient: the same work succeeds when retried. A full disk or an invalid statement are permanent. Work
passed to ``retrying`` must be idempotent: an error can arrive after the database has committed, if only the
acknowledgement was lost. A wait of more than two seconds is logged.
"""

from __future__ import annotations

import copy
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

from optuna_dsat.errors import StorageError, StudyDeletedError

T = TypeVar("T")

RETRY_LIMIT_S = 60.0
"""Seconds for which work is retried before it fails."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_SILENT_S = 2.0
"""Waits shorter than this many seconds are not logged."""

_logger = logging.getLogger(__name__)

_SQLITE_TRANSIENT = frozenset({5, 6, 8})
"""SQLITE_BUSY, SQLITE_LOCKED and SQLITE_READONLY (https://www.sqlite.org/rescode.html); they are the low byte of
extended codes, such as SQLITE_READONLY_DIRECTORY."""
_SQLITE_MOVED = 1032
"""SQLITE_READONLY_DBMOVED: the database file was moved or removed, which is permanent."""
_SQLITE_ORPHAN, _POSTGRES_ORPHAN = 787, "23503"
"""SQLITE_CONSTRAINT_FOREIGNKEY and ``foreign_key_violation``: the parent of a new row was deleted."""
_POSTGRES_READ_ONLY = "25006"
"""``read_only_sql_transaction``: the server is a standby, or was set read-only."""

_POSTGRES_TRANSIENT = ("08", _POSTGRES_READ_ONLY, "40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03")
"""SQLSTATE prefixes (PostgreSQL documentation, appendix A): connection exceptions, read-only, serialization failure,
deadlock, too many connections, lock not available, shutdown by an administrator, crash shutdown, cannot
connect now."""


class CommitLostError(Exception):
    """The connection broke during a commit, which may or may not have succeeded.

    Not a subclass of SQLAlchemy's errors: Optuna retries the creation of a trial after them, which may create it twice.
    """

    def __init__(self, error: DBAPIError) -> None:
        super().__init__(str(error))
        self.error = error


def tell_lost_commits(engine: Engine) -> None:
    """Make an engine raise ``CommitLostError`` if a connection breaks during a commit."""

    @event.listens_for(engine, "handle_error")
    def lost(context: ExceptionContext) -> None:
        error = context.sqlalchemy_exception
        if context.is_disconnect and context.statement is None and isinstance(error, DBAPIError):
            raise CommitLostError(error)


def leave_read_only_servers(engine: Engine) -> None:
    """Make an engine close connections to a read-only server: the next connection may reach another server."""

    @event.listens_for(engine, "handle_error")
    def leave(context: ExceptionContext) -> None:
        if getattr(context.original_exception, "sqlstate", None) == _POSTGRES_READ_ONLY:
            context.is_disconnect = True


def _database_error(error: BaseException) -> DBAPIError | None:
    """Return the database driver's error that caused an error, or None.

    Optuna wraps driver errors. It may also query again while handling a broken connection. The driver's error is then
    the context of SQLAlchemy's ``PendingRollbackError``.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, DBAPIError):
            return link
        if isinstance(link, CommitLostError):
            return link.error
        link = link.__context__ if isinstance(link, PendingRollbackError) else link.__cause__
    return None


def is_transient(error: BaseException) -> bool:
    """Return whether the work that raised ``error`` may succeed when retried."""
    result = _database_error(error)
    if result is None:
        return False
    if result.connection_invalidated:
        return True
    sqlite_code = getattr(result.orig, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return sqlite_code != _SQLITE_MOVED and (sqlite_code & 0xFF) in _SQLITE_TRANSIENT
    sqlstate = getattr(result.orig, "sqlstate", None)
    if sqlstate is not None:
        return str(sqlstate).startswith(_POSTGRES_TRANSIENT)
    if type(result.orig).__module__.startswith("sqlite3"):
        return False
    # psycopg reports a refused or broken connection without an SQLSTATE.
    return isinstance(result, OperationalError | InterfaceError)


def _is_orphan(error: BaseException) -> bool:
    """Return whether the parent of a new row was deleted, which happens only if the study was deleted."""
    original = getattr(_database_error(error), "orig", None)
    code = getattr(original, "sqlite_errorcode", None), getattr(original, "sqlstate", None)
    return code in ((_SQLITE_ORPHAN, None), (None, _POSTGRES_ORPHAN))


def one_line_reason(error: BaseException) -> str:
    """Return the first line of the driver's message, without SQL, parameters or passwords."""
    result = _database_error(error)
    cause: BaseException | None = result.orig if result is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(cause).__name__


def retrying(work: Callable[[], T], *, database: str, limit_s: float = RETRY_LIMIT_S) -> T:
    """Run idempotent ``work``; retry with exponential backoff while it raises transient database errors.

    Returns:
        The result of ``work``.

    Raises:
        StudyDeletedError: If the study that the work writes to was deleted.
        StorageError: If another database error is permanent, or transient errors persist for ``limit_s``.
    """
    began = time.monotonic()
    deadline = began + limit_s
    pause_s, logged = _FIRST_PAUSE_S, False
    while True:
        try:
            done = work()
        except Exception as error:
            if isinstance(error, StorageError) or _database_error(error) is None:
                raise
            if _is_orphan(error):
                raise StudyDeletedError(f"The study was deleted from {database} while it was searched.") from error
            if not is_transient(error):
                raise StorageError(
                    f"The database {database} failed: {one_line_reason(error)}. "
                    f"What was stored before is intact; resume the study once this is repaired."
                ) from error
            now = time.monotonic()
            if now + pause_s > deadline:
                raise StorageError(
                    f"The database {database} did not come back within {limit_s:g} s: "
                    f"{one_line_reason(error)}. "
                    f"What was stored before is intact; resume the study once it answers."
                ) from error
            if now - began > _SILENT_S and not logged:
                logged = True
                _logger.warning(
                    "The database %s cannot be used, waiting up to %.0f s for it: %s.",
                    database,
                    limit_s,
                    one_line_reason(error),
                )
        else:
            if logged:
                _logger.warning("The database %s can be used again after %.0f s.", database, time.monotonic() - began)
            return done
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


# Optuna storage that retries after transient errors, such as a server restart or a locked file.
#
# Every call is retried after a transient error (see ``retrying``). An error can also arrive after the database has
# committed, if only the acknowledgement was lost; the retry then operates on its own result. Consequences by method:
#
# * Reads, attributes, intermediate values, parameters: repeating the write is idempotent.
# * ``set_trial_state_values`` to a finished state: the retry finds the trial finished. This is accepted if the stored
#   state equals the requested state; otherwise the error is raised (another worker has finished the trial).
# * ``set_trial_state_values`` to RUNNING: the retry assumes that a running trial is its own. Trials are asked for under
#   the database's lock. If the lock was lost and another worker has the trial, only one of the two may claim its
#   configuration.
# * ``create_new_trial``: each trial stores the id of its request, so the retry finds the trial if it was created. A
#   second trial would count as a trial and shift the numbers of all later trials.
# * ``create_new_study``: the retry reports that the name is taken; the registry adopts a study that is still empty.
# * ``delete_study``: the retry does not find the study, which is the requested result.

REQUEST = "dsat_request"
"""System attribute of a trial: which call created it."""


def _retried(name: str) -> Callable[..., Any]:
    """Return a method that calls the backend's method of this name, again after transient errors."""

    def call(self: RetryingStorage, *args: Any, **kwargs: Any) -> Any:
        return self._retry(lambda _again: getattr(self._backend, name)(*args, **kwargs))

    return call


class RetryingStorage(BaseStorage):
    """Storage that retries the calls of the wrapped storage after transient errors.

    It does not implement Optuna's heartbeat; ``Heartbeat`` replaces it, survives errors and works with ask and tell.
    """

    def __init__(
        self,
        backend: BaseStorage,
        *,
        database: str,
        retry_limit_s: float = RETRY_LIMIT_S,
        require_present: Callable[[], None] = lambda: None,
    ) -> None:
        self._require_present = require_present
        self._backend = backend
        self._database = database
        self._retry_limit_s = retry_limit_s

    def _retry(self, work: Callable[[bool], T]) -> T:
        """Run ``work(again)``. ``again`` is True for a retry: the earlier attempt may have been committed."""
        again = False

        def attempt() -> T:
            nonlocal again
            self._require_present()
            parts, again = again, True
            return work(parts)

        return retrying(attempt, database=self._database, limit_s=self._retry_limit_s)

    create_new_study = _retried("create_new_study")
    set_study_user_attr = _retried("set_study_user_attr")
    set_study_system_attr = _retried("set_study_system_attr")
    get_study_id_from_name = _retried("get_study_id_from_name")
    get_study_name_from_id = _retried("get_study_name_from_id")
    get_study_directions = _retried("get_study_directions")
    get_study_user_attrs = _retried("get_study_user_attrs")
    get_study_system_attrs = _retried("get_study_system_attrs")
    get_all_studies = _retried("get_all_studies")
    set_trial_param = _retried("set_trial_param")
    get_trial_id_from_study_id_trial_number = _retried("get_trial_id_from_study_id_trial_number")
    set_trial_intermediate_value = _retried("set_trial_intermediate_value")
    set_trial_user_attr = _retried("set_trial_user_attr")
    set_trial_system_attr = _retried("set_trial_system_attr")
    get_trial = _retried("get_trial")
    get_all_trials = _retried("get_all_trials")
    get_best_trial = _retried("get_best_trial")

    def delete_study(self, study_id: int) -> None:
        """See ``optuna.storages.BaseStorage``."""

        def delete(again: bool) -> None:
            try:
                self._backend.delete_study(study_id)
            except KeyError:
                if not again:
                    raise

        self._retry(delete)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """See ``optuna.storages.BaseStorage``; the trial gets a system attribute, ``REQUEST``."""
        request = uuid.uuid4().hex
        template = create_trial(state=TrialState.RUNNING) if template_trial is None else copy.deepcopy(template_trial)
        template.system_attrs = {**template.system_attrs, REQUEST: request}

        def create(again: bool) -> int:
            if again:
                trials = self._backend.get_all_trials(study_id, deepcopy=False)
                made = [trial._trial_id for trial in trials if trial.system_attrs.get(REQUEST) == request]
                if made:
                    return made[0]
            return self._backend.create_new_trial(study_id, template)

        return self._retry(create)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """See ``optuna.storages.BaseStorage``."""

        def set_state(again: bool) -> bool:
            try:
                if self._backend.set_trial_state_values(trial_id, state, values):
                    return True
            except UpdateFinishedTrialError:
                if not again or self._backend.get_trial(trial_id).state is not state:
                    raise
                return True
            return again and self._backend.get_trial(trial_id).state is state

        return self._retry(set_state)

    def remove_session(self) -> None:
        """See ``optuna.storages.BaseStorage``."""
        self._backend.remove_session()
