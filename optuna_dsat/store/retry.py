"""Which database errors pass by themselves, and how long to wait for that.

A locked SQLite file and a Postgres server that restarts are transient: the same work, tried again, succeeds.
A full disk, a read-only file or a bad statement is not. Everything that ``retrying`` runs must therefore be
safe to run twice: an error can arrive after the database has committed, when only the acknowledgement was
lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

from optuna_dsat.errors import StorageError

__all__ = ["RETRY_LIMIT_S", "database_error", "is_transient", "one_line_reason", "retrying"]

T = TypeVar("T")

RETRY_LIMIT_S = 60.0
"""How long work is tried again before it fails, in seconds."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

_SQLITE_TRANSIENT = frozenset({5, 6})
"""SQLITE_BUSY and SQLITE_LOCKED (https://www.sqlite.org/rescode.html); the low byte of extended codes."""

_POSTGRES_TRANSIENT = ("08", "40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03")
"""SQLSTATE prefixes (PostgreSQL documentation, appendix A): connection exceptions, serialization failure,
deadlock, too many connections, lock not available, shutdown by an administrator, crash shutdown, cannot
connect now."""


def database_error(error: BaseException) -> DBAPIError | None:
    """Return the database driver's error behind an error, None where there is none.

    Optuna wraps it, and once reads again while it handles a broken connection: then the driver's error is the context
    of SQLAlchemy's ``PendingRollbackError``.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, DBAPIError):
            return link
        link = link.__context__ if isinstance(link, PendingRollbackError) else link.__cause__
    return None


def is_transient(error: BaseException) -> bool:
    """Tell whether the work that raised ``error`` may succeed when it is run again."""
    found = database_error(error)
    if found is None:
        return False
    if found.connection_invalidated:
        return True
    sqlite_code = getattr(found.orig, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return (sqlite_code & 0xFF) in _SQLITE_TRANSIENT
    sqlstate = getattr(found.orig, "sqlstate", None)
    if sqlstate is not None:
        return str(sqlstate).startswith(_POSTGRES_TRANSIENT)
    if type(found.orig).__module__.startswith("sqlite3"):
        return False
    # psycopg reports a connection that was refused or broke off without an SQLSTATE.
    return isinstance(found, OperationalError | InterfaceError)


def one_line_reason(error: BaseException) -> str:
    """Return the driver's own words in one line, without SQL, parameters or a password."""
    found = database_error(error)
    cause: BaseException | None = found.orig if found is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(cause).__name__


def retrying(work: Callable[[], T], *, database: str, limit_s: float = RETRY_LIMIT_S) -> T:
    """Run ``work``, again and again through transient database errors, with growing pauses.

    Args:
        work: What to do; it must be safe to run twice.
        database: How to name the database in a message: never with its password.
        limit_s: Seconds after which a transient error is final.

    Returns:
        What ``work`` returned.

    Raises:
        StorageError: The database failed for good, or did not come back within ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return work()
        except Exception as error:
            if database_error(error) is None:
                raise
            if not is_transient(error):
                raise StorageError(
                    f"The database {database} failed: {one_line_reason(error)}. "
                    f"What was stored before is intact; resume the study once this is repaired."
                ) from error
            if time.monotonic() + pause_s > deadline:
                raise StorageError(
                    f"The database {database} did not come back within {limit_s:g} s: "
                    f"{one_line_reason(error)}. "
                    f"What was stored before is intact; resume the study once it answers."
                ) from error
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
