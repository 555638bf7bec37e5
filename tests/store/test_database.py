from __future__ import annotations

import builtins
import sqlite3
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from optuna_dsat.errors import StorageUrlError
from optuna_dsat.store import Store, display_url, migrate
from optuna_dsat.store.database import Database
from optuna_dsat.store.migrate import open_optuna_tables
from optuna_dsat.store.urls import parse_url


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@host/db",
        "postgres://me:hunter2@host:notaport/db",
        "postgresql+psycopg://host/db?user=me&password=hunter2",
        "mysql://me:hunter2@host/db",
        "://me:hunter2@host",
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    assert "hunter2" not in display_url(url)


@pytest.mark.parametrize(
    "url", ["postgres://me:hunter2@host:notaport/db", "mysql://me:hunter2@host/db", "://me:hunter2@host"]
)
def test_a_refusal_does_not_show_the_password(url: str) -> None:
    with pytest.raises(StorageUrlError) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
def test_every_postgres_url_means_psycopg_3(scheme: str) -> None:
    parsed = parse_url(f"{scheme}://me:p%40ss@host:5433/db?sslmode=require")
    assert parsed.drivername == "postgresql+psycopg"
    assert (parsed.password, parsed.port, parsed.query["sslmode"]) == ("p@ss", 5433, "require")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://me@host/db", "unsupported kind"),
        ("postgresql+asyncpg://me@host/db", "unsupported kind"),
        ("sqlite:///a.db?uri=true&mode=ro", "takes none"),
        ("postgresql://me@127.0.0.1:1/db?port=abc", "an option that cannot be used: .*port"),
        ("postgresql://me@127.0.0.1:1/db?connect_timeout=abc", "cannot be opened: .*connect_timeout"),
        ("nonsense", "cannot be parsed"),
        ("sqlite://", "not a file"),
        ("sqlite:///:memory:", "not a file"),
        ("sqlite:////nowhere/at/all/study.db", "does not exist"),
        ("sqlite:////tmp", "is not a file"),
        ("sqlite:///a{b}.db", "brace"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_in_one_line(url: str, reason: str) -> None:
    with pytest.raises(StorageUrlError, match=reason) as caught:
        Store.open(url)
    assert "\n" not in str(caught.value)


def test_a_server_that_refuses_is_named_in_one_line() -> None:
    with pytest.raises(StorageUrlError, match="cannot be opened") as caught:
        Store.open("postgresql://me:hunter2@127.0.0.1:1/db")
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.db"
    path.write_text("this is not a database, but long enough to look like a header of one\n" * 20)
    with pytest.raises(StorageUrlError, match="is not an SQLite database"):
        Store.open(f"sqlite:///{path}")


def test_a_missing_file_is_made_only_where_wanted(tmp_path: Path) -> None:
    with pytest.raises(StorageUrlError, match="There is no database"):
        Store.open(f"sqlite:///{tmp_path}/typo.db", create=False)
    assert not list(tmp_path.iterdir())


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "psycopg":
            raise ImportError("No module named 'psycopg'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(StorageUrlError, match=r"optuna-dsat\[postgres\]"):
        parse_url("postgresql://host/db")


def test_a_relative_file_belongs_to_the_directory_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = parse_url("sqlite:///study.db")
    monkeypatch.undo()
    assert parsed.database == str(tmp_path / "study.db")


def test_sqlite_settings_hold_for_both_engines(ready_sqlite_url: str) -> None:
    with Store.open(ready_sqlite_url) as store:
        for engine in (store._database.engine, store._rdb.engine):
            with engine.connect() as connection:
                pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
                result = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in pragmas]
                assert result == ["wal", 1, 1, 60_000]
                other = sqlite3.connect(ready_sqlite_url.removeprefix("sqlite:///"), timeout=0)
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    other.execute("BEGIN IMMEDIATE")
                other.close()


def test_reading_does_not_wait_for_a_writer(ready_sqlite_url: str) -> None:
    with Store.open(ready_sqlite_url) as store:
        with sqlite3.connect(ready_sqlite_url.removeprefix("sqlite:///"), isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            assert store.find_profile("none") is None
            other.rollback()
        other.close()


@pytest.mark.postgres
def test_postgres_sessions_are_in_utc(ready_postgres_url: str) -> None:
    with Store.open(ready_postgres_url) as store:
        for engine in (store._database.engine, store._rdb.engine):
            with engine.connect() as connection:
                assert connection.execute(text("SHOW timezone")).scalar() == "UTC"


def test_the_lock_keeps_threads_and_other_connections_out(ready_url: str) -> None:
    first, second = Database(ready_url), Database(ready_url)
    order: list[str] = []

    def other() -> None:
        with second.exclusive("test"):
            order.append("second")

    thread = threading.Thread(target=other)
    with first.exclusive("test"):
        thread.start()
        thread.join(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    first.close()
    second.close()


def test_optuna_reads_the_database_with_its_own_url(ready_url: str) -> None:
    with Store.open(ready_url) as store:
        store.create_study("one", {})
    storage = optuna.storages.RDBStorage(ready_url)
    assert optuna.get_all_study_names(storage) == ["one"]
    storage.remove_session()
    storage.engine.dispose()


def test_a_database_that_is_locked_while_optunas_tables_are_made_is_waited_for(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def locked_once(*args: Any, **kwargs: Any) -> RDBStorage:
        made.append("tried")
        if len(made) == 1:
            original = sqlite3.OperationalError("database is locked")
            original.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise OperationalError("CREATE TABLE studies", None, original)
        return RDBStorage(*args, **kwargs)

    monkeypatch.setattr(migrate, "RDBStorage", locked_once)
    with Store.open(sqlite_url) as store:
        assert store.list_studies() == ()
    assert len(made) == 2


def close(rdb: RDBStorage) -> None:
    rdb.remove_session()
    rdb.engine.dispose()


def test_what_one_writes_the_other_reads(ready_sqlite_url: str) -> None:
    ours, optunas = open_optuna_tables(Database(ready_sqlite_url)), RDBStorage(ready_sqlite_url)
    try:
        study = optuna.create_study(study_name="s", storage=ours)
        trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
        study.tell(trial, 1.0)
        assert optuna.load_study(study_name="s", storage=optunas).trials == study.trials
    finally:
        close(ours)
        close(optunas)


@pytest.mark.parametrize("damage", ["DROP TABLE trial_heartbeats", "DELETE FROM alembic_version"])
def test_tables_that_are_not_ready_are_made_so_by_optuna(ready_sqlite_url: str, damage: str) -> None:
    database = Database(ready_sqlite_url)
    with database.engine.begin() as connection:
        connection.execute(text(damage))
    rdb = open_optuna_tables(database)
    try:
        assert rdb.get_current_version() == rdb.get_head_version()
    finally:
        close(rdb)


def test_another_schema_is_refused(ready_sqlite_url: str) -> None:
    database = Database(ready_sqlite_url)
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'v9.0.0.a'"))
    with pytest.raises(StorageUrlError, match=r"schema v9\.0\.0\.a.*install a newer Optuna"):
        open_optuna_tables(database)
