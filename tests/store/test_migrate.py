from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import event, inspect, text
from sqlalchemy.exc import OperationalError

from optuna_dsat.errors import StorageError, StorageUrlError
from optuna_dsat.store import Store, migrate
from optuna_dsat.store.database import Database
from optuna_dsat.store.tables import Base

NEXT = '''"""A later version."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("dsat_claims", sa.Column("note", sa.Text()))
'''


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with closing(Database(url)) as opened:
        yield opened


@pytest.fixture
def later_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "migrations"
    shutil.copytree(migrate.migrations_path(), folder)
    (folder / "versions" / "0004_later.py").write_text(NEXT)
    monkeypatch.setattr(migrate, "migrations_path", lambda: folder)


def test_the_migrations_make_what_the_models_describe(database: Database) -> None:
    assert migrate.check(database) is migrate.SchemaState.NEW
    for _ in range(2):  # the second changes nothing
        migrate.upgrade(database)
        assert migrate.current(database) == migrate.head()
    assert migrate.check(database) is migrate.SchemaState.CURRENT
    options = {"compare_type": True, "include_name": lambda name, kind, _: kind != "table" or "version" not in name}
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
        assert set(inspect(connection).get_table_names()) == {*Base.metadata.tables, migrate.VERSION_TABLE}
    with Store.open(database.url.render_as_string(hide_password=False)) as store:
        assert store.list_studies() == (), "Optuna's tables are made after ours"


def test_an_upgrade_that_fails_halfway_leaves_no_older_schema_behind(database: Database) -> None:
    def fails(_cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO dsat_alembic_version"):  # the tables are made
            original = sqlite3.OperationalError("database or disk is full")
            original.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise OperationalError(statement, None, original)

    event.listen(database.engine, "do_execute", fails)
    with pytest.raises(StorageError, match="disk is full"):
        migrate.upgrade(database)
    event.remove(database.engine, "do_execute", fails)
    assert migrate.check(database) is migrate.SchemaState.NEW
    migrate.upgrade(database)
    assert migrate.check(database) is migrate.SchemaState.CURRENT


def test_an_older_database_is_refused_with_the_command(url: str, request: pytest.FixtureRequest) -> None:
    with Store.open(url) as store:
        store.create_study("kept", {"a": 1})
    request.getfixturevalue("later_version")
    with pytest.raises(StorageUrlError, match="optuna-dsat db upgrade --storage"):
        Store.open(url)
    with closing(Database(url)) as database:
        migrate.upgrade(database)
        assert migrate.current(database) == "0004"
    with Store.open(url) as store:
        assert [record.name for record in store.list_studies()] == ["kept"]


@pytest.mark.usefixtures("later_version")
def test_a_newer_database_is_refused_plainly(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(url).close()
    monkeypatch.undo()
    with pytest.raises(StorageUrlError, match="made by a newer optuna-dsat"):
        Store.open(url)
    with closing(Database(url)) as database:
        with pytest.raises(StorageUrlError, match="made by a newer optuna-dsat"):
            migrate.upgrade(database)
        assert migrate.current(database) == "0004"


def test_our_tables_come_before_or_after_optunas(url: str) -> None:
    storage = optuna.storages.RDBStorage(url)
    optuna.create_study(study_name="foreign", storage=storage)
    storage.remove_session()
    storage.engine.dispose()
    with Store.open(url) as store:
        store.create_study("ours", {})
        assert sorted(optuna.get_all_study_names(store.storage)) == ["foreign", "ours"]
        store._rdb.upgrade()
        assert migrate.check(store._database) is migrate.SchemaState.CURRENT


def test_optunas_own_older_schema_is_refused_with_its_command(url: str) -> None:
    with Store.open(url) as store, store._database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'v2.6.0.a'"))
    with pytest.raises(StorageUrlError, match="optuna storage upgrade"):
        Store.open(url)


def test_logging_is_left_alone(sqlite_url: str) -> None:
    ours = logging.getLogger("optuna_dsat.some.module")
    root_handlers = list(logging.getLogger().handlers)
    Store.open(sqlite_url).close()
    assert not ours.disabled
    assert logging.getLogger().handlers == root_handlers
