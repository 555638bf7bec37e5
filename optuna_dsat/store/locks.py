"""Locks between processes, which are released when the holding process ends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, func, select

from optuna_dsat.errors import StorageError

__all__ = ["LockLostError", "advisory_lock", "file_lock"]

_PAUSE_S = 0.02

_ADVISORY_KEY = 0x64736174
"""Key of the advisory lock: the letters "dsat". Advisory locks are per database in PostgreSQL."""
_WRITERS_KEY = _ADVISORY_KEY + 1
"""Key that each transaction of the lock's holder shares until it ends."""


class LockLostError(StorageError):
    """The server freed the lock of the database while its holder worked; that transaction wrote nothing."""


def _timed_out(*, purpose: str, timeout_s: float) -> StorageError:
    return StorageError(
        f"Another process held the lock of the database for more than {timeout_s:g} s, and this one "
        f"needs it to {purpose}: look for an optuna-dsat process that hangs."
    )


@contextmanager
def file_lock(path: Path, *, purpose: str, timeout_s: float) -> Iterator[None]:
    """Hold a lock file against other processes and threads.

    Args:
        path: The lock file, created if missing. Must not be the database itself: closing any descriptor of an
            SQLite file drops the locks that SQLite holds on it (https://www.sqlite.org/howtocorrupt.html,
            section 2.2).
        purpose: Purpose as a verb phrase, for the error message.
        timeout_s: Maximum wait, in seconds.

    Raises:
        StorageError: If the lock was not free in time.
        OSError: If the file cannot be created.
    """
    lock = FileLock(path, timeout=timeout_s, poll_interval=_PAUSE_S, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise _timed_out(purpose=purpose, timeout_s=timeout_s) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def advisory_lock(engine: Engine, *, purpose: str, timeout_s: float) -> Iterator[Callable[[Connection], None]]:
    """Hold a PostgreSQL advisory lock in a session of its own; the server releases it when the session ends.

    The restart of a server, or a cut connection, releases it while its holder works on. So each transaction of the
    holder begins with the function that this yields: it raises ``LockLostError`` if the lock is gone, and otherwise
    nobody else gets the lock before the transaction has ended.

    The session holds a second lock of a number drawn at random, which is free if the session is gone. A transaction
    looks only after it has begun to share a third one, for which whoever gets the lock waits once.

    Args:
        engine: An engine on the database.
        purpose: Purpose as a verb phrase, for the error message.
        timeout_s: Maximum wait, in seconds.

    Raises:
        StorageError: If the lock was not free in time.
        sqlalchemy.exc.DBAPIError: If the server is unreachable.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        deadline = time.monotonic() + timeout_s
        token = secrets.randbits(62) | 1 << 62  # of no key above
        for key in (token, _ADVISORY_KEY, _WRITERS_KEY):
            while not connection.execute(select(func.pg_try_advisory_lock(key))).scalar_one():
                if time.monotonic() > deadline:
                    connection.invalidate()  # frees what it got
                    raise _timed_out(purpose=purpose, timeout_s=timeout_s)
                time.sleep(_PAUSE_S)
        connection.execute(select(func.pg_advisory_unlock(_WRITERS_KEY)))

        def require(transaction: Connection) -> None:
            transaction.execute(select(func.pg_advisory_xact_lock_shared(_WRITERS_KEY)))
            if transaction.execute(select(func.pg_try_advisory_xact_lock(token))).scalar_one():
                raise LockLostError(
                    f"The database's server ended the connection that held its lock, which was needed to {purpose}. "
                    "What was stored before is intact; resume the study."
                )

        try:
            yield require
        finally:
            # Ends the session, which releases the lock; does not fail if the server has become unreachable.
            connection.invalidate()
