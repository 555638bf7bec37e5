"""The points of a process: statements that write, files that change, processes that start or end."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psycopg
from sqlalchemy import Engine, event
from sqlalchemy.engine.default import DefaultDialect

from optuna_dsat.store import Store


class Blow(StrEnum):
    """What befalls a process at a point."""

    KILL = "kill"
    DISK_FULL = "disk full"
    """From then on nothing new can be written."""
    IO_ERROR = "I/O error"
    """From then on no write works."""
    LOCKED = "locked"
    """The database is locked for this one statement."""
    READ_ONLY = "read-only"
    """From then on the database takes no writes; files are written as ever."""
    CUT = "cut"
    """The connection is cut before the statement."""
    CUT_AFTER = "cut after"
    """The connection is cut after the commit, before its acknowledgement."""


DISK = frozenset({Blow.DISK_FULL, Blow.IO_ERROR})
"""Blows that strike files and database alike."""
LASTING = DISK | {Blow.READ_ONLY}
"""Blows that last until the process has ended."""
TRANSIENT = frozenset({Blow.LOCKED, Blow.CUT, Blow.CUT_AFTER})
"""Blows that a process must get over by itself."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point."""

    kind: str
    """``statement``, ``commit``, ``file`` or ``process``."""
    what: str
    site: str = ""
    """The code that led there, innermost first: functions of the package, each with the line within it."""

    @property
    def place(self) -> tuple[str, str, str]:
        """What the passes of a loop have in common: all but the numbers in names."""
        return self.kind, _NUMBER.sub("#", self.what), self.site


_NUMBER = re.compile(r"[0-9a-f]{32}|[0-9]+")


def applies(blow: Blow, point: Point, *, database: str) -> bool:
    """Whether something can befall a process at a point.

    Args:
        blow: What.
        point: Where.
        database: ``sqlite`` or ``postgres``.
    """
    if blow is Blow.KILL:
        return True
    if blow in (Blow.CUT, Blow.CUT_AFTER):
        kinds = ("statement", "commit") if blow is Blow.CUT else ("commit",)
        return database == "postgres" and point.kind in kinds
    if blow in (Blow.LOCKED, Blow.READ_ONLY):
        return point.kind in ("statement", "commit")
    if blow is Blow.DISK_FULL and point.kind == "file":
        return point.what.split()[0] in ("create", "mkdir")
    return point.kind != "process"


_READS = frozenset({"SELECT", "PRAGMA", "BEGIN", "SHOW", "SET", "COMMIT", "ROLLBACK", "EXPLAIN", "WITH"})
_FILE_EVENTS = {
    "os.rename": "rename",
    "os.remove": "remove",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.link": "link",
    "os.symlink": "symlink",
    "os.truncate": "truncate",
}
_PROCESS_EVENTS = {"subprocess.Popen": "start", "os.fork": "fork", "os.posix_spawn": "spawn"}
_SIGNAL_EVENTS = frozenset({"os.kill", "os.killpg"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_SHARED_MEMORY = "/dev/shm/"
_ERRNO = {Blow.DISK_FULL: errno.ENOSPC, Blow.IO_ERROR: errno.EIO}


class Points:
    """Counts the points of this process, and lets something befall it at one of them.

    Only the main thread's points count: the heartbeat's come when they like.

    Args:
        notes: Descriptor that each point is written to, one line of JSON each; None for none.
        at: Number of the point, from 0; None to only count.
        blow: What befalls the process there.
    """

    def __init__(self, *, notes: int | None = None, at: int | None = None, blow: Blow = Blow.KILL) -> None:
        self._notes = notes
        self._at = at
        self._blow = blow
        self._count = 0
        self._thread = threading.get_ident()
        self._busy = False
        self._written: set[int] = set()
        """Ids of connections with a transaction that has written."""

    def install(self) -> None:
        """Watch this process from now on; there is no way back, so it must be one made for that."""
        if self._blow is Blow.READ_ONLY:  # such a database is waited for, which must end within this run
            opening: Any = Store.open
            opening.__func__.__kwdefaults__["retry_limit_s"] = 1.0
        sys.addaudithook(self._audit)
        event.listen(Engine, "do_execute", lambda c, s, _p, _x: self._statement(c, s))
        event.listen(Engine, "do_executemany", lambda c, s, _p, _x: self._statement(c, s))
        event.listen(Engine, "do_execute_no_params", lambda c, s, _x: self._statement(c, s))
        plain: Any = DefaultDialect
        commit, rollback = plain.do_commit, plain.do_rollback

        def counted_commit(dialect: DefaultDialect, connection: Any) -> None:
            self._commit(connection, lambda: commit(dialect, connection))

        def counted_rollback(dialect: DefaultDialect, connection: Any) -> None:
            self._written.discard(id(connection.driver_connection))
            rollback(dialect, connection)

        plain.do_commit, plain.do_rollback = counted_commit, counted_rollback

    def _reached(self, kind: str, what: str) -> bool:
        """Count a point; return whether something befalls the process there."""
        if threading.get_ident() != self._thread or self._busy:
            return False
        self._busy = True
        try:
            number, self._count = self._count, self._count + 1
            if self._notes is not None:
                point = Point(kind=kind, what=what, site=_site(sys._getframe(1)))
                os.write(self._notes, f"{json.dumps(asdict(point))}\n".encode())
            if self._at is None:
                return False
            if self._blow is Blow.KILL and number == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._blow is Blow.CUT_AFTER:  # a commit's, and another point may have come before it this time
                struck = number >= self._at and kind == "commit"
                self._at = None if struck else self._at
                return struck
            return number == self._at or (number > self._at and self._blow in LASTING)
        finally:
            self._busy = False

    def _statement(self, cursor: Any, statement: str) -> None:
        words = statement.split(None, 3)
        if words[0].upper() in _READS:
            return
        connection = _driver_connection(cursor)
        self._written.add(id(connection))
        if self._reached("statement", " ".join(words[:3]).replace("\n", " ")[:60]):
            self._fail(connection)

    def _commit(self, connection: Any, commit: Callable[[], None]) -> None:
        driver = connection.driver_connection
        if id(driver) not in self._written:
            commit()
            return
        self._written.discard(id(driver))
        if not self._reached("commit", "COMMIT"):
            commit()
        elif self._blow is Blow.CUT_AFTER:
            commit()
            driver.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        else:
            self._fail(driver)
            commit()  # raises where the connection is cut

    def _fail(self, connection: Any) -> None:
        """Raise the driver's error for what befalls the process, or cut the connection."""
        if self._blow is Blow.CUT:
            with socket.socket(fileno=os.dup(connection.fileno())) as wire:
                wire.shutdown(socket.SHUT_RDWR)
        elif isinstance(connection, sqlite3.Connection):
            raise _sqlite_error(self._blow)
        else:
            raise _postgres_error(self._blow)

    def _audit(self, name: str, args: tuple[Any, ...]) -> None:
        if self._busy:
            return
        if name == "open":
            self._file_opened(*args)
        elif name in _FILE_EVENTS and isinstance(args[0], str | bytes | os.PathLike):
            self._file(_FILE_EVENTS[name], os.fsdecode(args[0]))
        elif name in _PROCESS_EVENTS:
            self._reached("process", _PROCESS_EVENTS[name])
        elif name in _SIGNAL_EVENTS and args[1] != 0:
            self._reached("process", "end")

    def _file_opened(self, path: Any, _mode: Any, flags: Any) -> None:
        if not isinstance(flags, int) or not flags & _WRITING or not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.fsdecode(path)
        self._file("write" if os.path.lexists(name) else "create", name)

    def _file(self, verb: str, path: str) -> None:
        if path.startswith(_NO_FILES) and not path.startswith(_SHARED_MEMORY):
            return
        struck = self._reached("file", f"{verb} {os.path.basename(path)}")  # noqa: PTH119 - no Path objects in a hook
        if struck and (self._blow is Blow.IO_ERROR or (self._blow is Blow.DISK_FULL and verb in ("create", "mkdir"))):
            number = _ERRNO[self._blow]
            raise OSError(number, os.strerror(number), path)


_ROOT = Path(__file__).parents[2]
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in ("optuna_dsat", "samplers", "pruners", "alembic"))
_LAUNCHER = str(Path(__file__).with_name("launcher.py"))


@cache
def _name(code: CodeType) -> str:
    """Return module and name of a function of the package or of the launcher; empty for others."""
    file = os.path.realpath(code.co_filename)
    ours = file.startswith(_OURS) or file == _LAUNCHER
    return f"{Path(file).relative_to(_ROOT)}:{code.co_qualname}" if ours else ""


def _site(frame: FrameType | None) -> str:
    """Return the functions of the package on a stack, innermost first, each with the line within it."""
    result = []
    while frame is not None:
        if name := _name(frame.f_code):
            result.append(f"{name}+{frame.f_lineno - frame.f_code.co_firstlineno}")
        frame = frame.f_back
    return " < ".join(result)


def _driver_connection(cursor: Any) -> Any:
    """Return the driver's connection of a cursor."""
    return getattr(cursor, "connection", cursor)


def _sqlite_error(blow: Blow) -> sqlite3.Error:
    """Return the error of Python's driver; its codes are those of https://www.sqlite.org/rescode.html."""
    text, code = {
        Blow.DISK_FULL: ("database or disk is full", 13),
        Blow.IO_ERROR: ("disk I/O error", 778),
        Blow.LOCKED: ("database is locked", 5),
        Blow.READ_ONLY: ("attempt to write a readonly database", 8),
    }[blow]
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


def _postgres_error(blow: Blow) -> psycopg.Error:
    return {
        Blow.DISK_FULL: psycopg.errors.DiskFull("could not extend file: No space left on device"),
        Blow.IO_ERROR: psycopg.errors.IoError("could not read block: Input/output error"),
        Blow.LOCKED: psycopg.errors.LockNotAvailable("could not obtain lock on relation"),
        Blow.READ_ONLY: psycopg.errors.ReadOnlySqlTransaction("cannot execute INSERT in a read-only transaction"),
    }[blow]
