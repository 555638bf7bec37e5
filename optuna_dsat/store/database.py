"""Opens a database by its URL, runs transactions on it and locks it against other processes.

SQLite is opened with WAL, ``synchronous=NORMAL``, foreign keys, a busy timeout of 60 s and immediate
transactions (a transaction that reads before it writes holds the write lock from its start; otherwise two workers
can take the same waiting trial). PostgreSQL is opened through psycopg 3, with a ping before a pooled connection is
used and sessions in UTC.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, create_engine, event, func, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from optuna_dsat.errors import StorageError, StorageUrlError
from optuna_dsat.store.retry import RETRY_LIMIT_S, leave_read_only_servers, one_line_reason, retrying
from optuna_dsat.store.urls import database_exists, display_url, parse_url

_PAUSE_S = 0.02

_ADVISORY_KEY = 0x64736174
"""Key of the advisory lock: the letters "dsat". Advisory locks are per database in PostgreSQL."""
_WRITERS_KEY = _ADVISORY_KEY + 1
"""Key that each transaction of the lock's owner shares until it ends."""


class LockLostError(StorageError):
    """The server released the database's lock while its owner was working; the transaction wrote nothing."""


def _timed_out(purpose: str) -> StorageError:
    return StorageError(
        f"Another process held the lock of the database for more than {LOCK_TIMEOUT_S:g} s, and this one "
        f"needs it to {purpose}: look for an optuna-dsat process that hangs."
    )


@contextmanager
def file_lock(path: Path, *, purpose: str) -> Iterator[None]:
    """Hold a lock file against other processes and threads; ``purpose`` is a verb phrase for the error message.

    It must not be the database itself: closing any descriptor of an SQLite file drops the locks that SQLite holds on it
    (https://www.sqlite.org/howtocorrupt.html, section 2.2).

    Raises:
        StorageError: If the lock was not free in time.
        OSError: If the file cannot be created.
    """
    lock = FileLock(path, timeout=LOCK_TIMEOUT_S, poll_interval=_PAUSE_S, fallback_to_soft=False)
    try:
        held = lock.acquire()
    except Timeout:
        raise _timed_out(purpose) from None
    with held:
        yield


@contextmanager
def advisory_lock(engine: Engine, *, purpose: str) -> Iterator[Callable[[Connection], None]]:
    """Hold a PostgreSQL advisory lock in a separate session; the server releases it when the session ends.

    A server restart or a broken connection releases the lock while its owner continues. So each transaction of the
    owner begins with the function that this yields. It raises ``LockLostError`` if the lock is gone; otherwise no
    other process gets the lock before the transaction has ended.

    The session holds a second lock with a random number, which is free if the session is gone. A transaction checks it
    only after it shares a third lock, for which each new owner of the first lock waits once.

    Raises:
        StorageError: If the lock was not free in time.
        sqlalchemy.exc.DBAPIError: If the server is unreachable.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        token = secrets.randbits(62) | 1 << 62  # differs from the keys above
        for key in (token, _ADVISORY_KEY, _WRITERS_KEY):
            while not connection.execute(select(func.pg_try_advisory_lock(key))).scalar_one():
                if time.monotonic() > deadline:
                    connection.invalidate()  # releases the locks acquired so far
                    raise _timed_out(purpose)
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


T = TypeVar("T")

SQLITE_BUSY_TIMEOUT_S = 60.0
"""SQLite's own timeout for a lock, in seconds."""

CONNECT_TIMEOUT_S = 10
"""libpq's timeout for a connection, in seconds."""

LOCK_TIMEOUT_S = 120.0
"""Timeout of ``Database.exclusive`` for the lock, in seconds."""

_READ_ONLY = "dsat_read_only"
_SQLITE_PRAGMAS = (
    f"PRAGMA busy_timeout={int(SQLITE_BUSY_TIMEOUT_S * 1000)}",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=NORMAL",
    "PRAGMA foreign_keys=ON",
)


def engine_options(url: URL) -> dict[str, Any]:
    """Return keyword arguments of ``sqlalchemy.create_engine`` for a parsed URL, for our engine and Optuna's."""
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": SQLITE_BUSY_TIMEOUT_S}, "hide_parameters": True}
    given = url.query.get("options", "")
    options = given if isinstance(given, str) else " ".join(given)
    return {
        "pool_pre_ping": True,
        "hide_parameters": True,
        "connect_args": {
            "options": f"{options} -c timezone=utc".strip(),
            "connect_timeout": str(url.query.get("connect_timeout", CONNECT_TIMEOUT_S)),
            "application_name": str(url.query.get("application_name", "optuna-dsat")),
        },
    }


def _lenient_text(data: bytes) -> str:
    """Decode stored text; replace invalid UTF-8, which SQLite accepts, instead of failing the query."""
    return data.decode("utf-8", errors="replace")


def install_events(engine: Engine) -> None:
    """Make an SQLite engine use our pragmas and immediate transactions, and any engine leave read-only servers."""
    leave_read_only_servers(engine)
    if engine.dialect.name != "sqlite":
        return

    @event.listens_for(engine, "connect")
    def configure(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.text_factory = _lenient_text
        dbapi_connection.isolation_level = None  # disables the driver's implicit BEGIN; `begin` below issues it
        cursor = dbapi_connection.cursor()
        for pragma in _SQLITE_PRAGMAS:
            cursor.execute(pragma)
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


class Database:
    """An open database: transactions that are retried after transient errors, and a lock between processes.

    Without ``create``, a missing SQLite file is an error.

    Attributes:
        url: The parsed URL, with the password.
        shown: The URL for display, with the password masked.
        engine: SQLAlchemy engine of our own tables.

    Raises:
        StorageUrlError: If the database is of an unsupported kind or cannot be opened.
    """

    def __init__(self, url: str, *, retry_limit_s: float = RETRY_LIMIT_S, create: bool = True) -> None:
        self.url = parse_url(url)
        self.shown = display_url(url)
        if not create and not database_exists(url):
            raise StorageUrlError(f"There is no database {self.shown}: name the right one with --storage.")
        self.retry_limit_s = retry_limit_s
        self.engine = create_engine(self.url, **engine_options(self.url))
        install_events(self.engine)
        self._opened: tuple[int, int] | None = None
        self._fence = threading.local()
        self.guard(self.engine)
        try:
            self._connect_once()
            self._opened = self._file()
        except (DBAPIError, OSError, ValueError) as error:
            self.engine.dispose()
            raise StorageUrlError(f"The storage '{self.shown}' cannot be opened: {one_line_reason(error)}.") from None

    def _file(self) -> tuple[int, int] | None:
        """Return device and inode of an SQLite file; None if it is gone. (0, 0) for a database on a server."""
        if self.engine.dialect.name != "sqlite":
            return 0, 0
        try:
            status = Path(str(self.url.database)).stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def require_present(self) -> None:
        """Raise if the SQLite file was removed or replaced since it was opened.

        SQLite itself silently continues with the unlinked file.

        Raises:
            StorageError: If the path no longer refers to the opened file.
        """
        if self._opened is None or self._file() == self._opened:
            return
        raise StorageError(
            f"The database {self.shown} was removed or replaced while the study ran: what is stored from now on would "
            "be lost, so the run ends. Put the file back to resume the study."
        )

    def _connect_once(self) -> None:
        with ExitStack() as stack:
            if self.engine.dialect.name == "sqlite":
                # Switching a new file to WAL ignores the busy timeout: concurrent attempts fail immediately.
                stack.enter_context(self.exclusive("open the database"))
            stack.enter_context(self.engine.connect()).execute(text("SELECT 1"))

    def run(self, work: Callable[[Session], T], *, read_only: bool = False, limit_s: float | None = None) -> T:
        """Run ``work`` in a transaction, commit it and return its result; retry after a transient error.

        It must be idempotent: it may run again even after a commit. With ``read_only``, it does not wait for writers on
        SQLite.

        Raises:
            StorageError: If the database failed, or was not available again within ``limit_s``.
        """

        def attempt() -> T:
            self.require_present()
            with self.engine.connect().execution_options(**{_READ_ONLY: read_only}) as connection:
                with Session(connection, expire_on_commit=False) as session, session.begin():
                    result = work(session)
                connection.commit()
                return result

        return retrying(attempt, database=self.shown, limit_s=self.retry_limit_s if limit_s is None else limit_s)

    @contextmanager
    def exclusive(self, purpose: str) -> Iterator[None]:
        """Hold the exclusive lock of this database, against other processes and threads; not reentrant.

        It is released when the process ends: ``FILE-lock`` next to an SQLite file, an advisory lock in PostgreSQL.

        Raises:
            StorageError: If the lock was not free within two minutes, or the database is unreachable.
            LockLostError: By a transaction of the block, if the server released the lock meanwhile.
        """
        self.require_present()
        if self.engine.dialect.name == "sqlite":
            with file_lock(Path(f"{self.url.database}-lock"), purpose=purpose):
                yield
            return
        stack = ExitStack()

        def enter() -> Callable[[Connection], None]:
            return stack.enter_context(advisory_lock(self.engine, purpose=purpose))

        require = retrying(enter, database=self.shown, limit_s=self.retry_limit_s)
        with stack, self.fenced(require):
            yield

    def exclusively(self, purpose: str, work: Callable[[], T]) -> T:
        """Run idempotent ``work`` under the exclusive lock and return its result.

        It is repeated if the server released the lock.

        Raises:
            StorageError: As ``exclusive``, or if the lock is lost repeatedly.
        """
        deadline = time.monotonic() + self.retry_limit_s
        while True:
            try:
                with self.exclusive(purpose):
                    return work()
            except LockLostError:
                if time.monotonic() > deadline:
                    raise

    def guard(self, engine: Engine) -> None:
        """Apply ``fenced`` to the transactions of an engine on this database."""

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            require: Callable[[Connection], None] | None = getattr(self._fence, "require", None)
            if require is not None:
                require(connection)

    @contextmanager
    def fenced(self, require: Callable[[Connection], None]) -> Iterator[None]:
        """Begin each transaction of this thread with ``require``, which raises if the transaction must not proceed.

        Reads and row locks of ``require`` are part of the transaction and hold until its commit. A nested fence
        replaces the outer fence.
        """
        outer = getattr(self._fence, "require", None)
        self._fence.require = require
        try:
            yield
        finally:
            self._fence.require = outer

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()
