"""Locks between processes that end with the process that holds them."""

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
    """Hold a lock file against other processes and other threads.

    Args:
        path: The lock file, created where missing. Never the database itself: closing any descriptor of an
            SQLite file drops the locks that SQLite holds on it (https://www.sqlite.org/howtocorrupt.html,
            section 2.2).
        purpose: What it is held for, as a verb, for the message.
        timeout_s: Longest wait, in seconds.

    Raises:
        StorageError: The lock was not free in time.
        OSError: The file cannot be created.
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
    """Hold a PostgreSQL advisory lock in a session of its own; the server frees it when the session ends.

    A restart of the server frees it too, while the holder still works: what is done under it must stay
    correct, if not tidy, when two do it at once.

    Args:
        engine: An engine on the database.
        purpose: What it is held for, as a verb, for the message.
        timeout_s: Longest wait, in seconds.

    Raises:
        StorageError: The lock was not free in time.
        sqlalchemy.exc.DBAPIError: The server cannot be reached.
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
            # Ending the session frees the lock, and cannot fail when the server has gone away meanwhile.
            connection.invalidate()
