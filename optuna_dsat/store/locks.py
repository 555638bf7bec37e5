"""Locks between processes, which are released when the holding process ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import Engine, func, select

from optuna_dsat.errors import StorageError

__all__ = ["advisory_lock", "file_lock"]

_PAUSE_S = 0.02

_ADVISORY_KEY = 0x64736174
"""Key of the advisory lock: the letters "dsat". Advisory locks are per database in PostgreSQL."""


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
def advisory_lock(engine: Engine, *, purpose: str, timeout_s: float) -> Iterator[None]:
    """Hold a PostgreSQL advisory lock in a session of its own; the server releases it when the session ends.

    A server restart releases it too, while the holder still works: work under the lock must stay correct even if
    two processes do it concurrently.

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
        while not connection.execute(select(func.pg_try_advisory_lock(_ADVISORY_KEY))).scalar_one():
            if time.monotonic() > deadline:
                raise _timed_out(purpose=purpose, timeout_s=timeout_s)
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            # Ends the session, which releases the lock; does not fail if the server has become unreachable.
            connection.invalidate()
