"""Optuna's tables are made ready, and refused where they are of another schema."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.storages import RDBStorage
from sqlalchemy import text

from optuna_dsat.errors import StorageUrlError
from optuna_dsat.store import Store
from optuna_dsat.store.database import Database
from optuna_dsat.store.optuna_tables import open_optuna_tables


@pytest.fixture
def ready(tmp_path: Path) -> str:
    """Return the URL of a database with all tables."""
    url = f"sqlite:///{tmp_path / 'ready.db'}"
    Store.open(url).close()
    return url


def close(rdb: RDBStorage) -> None:
    rdb.remove_session()
    rdb.engine.dispose()


def test_what_one_writes_the_other_reads(ready: str) -> None:
    ours, optunas = open_optuna_tables(Database(ready)), RDBStorage(ready)
    try:
        study = optuna.create_study(study_name="s", storage=ours)
        trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
        study.tell(trial, 1.0)
        assert optuna.load_study(study_name="s", storage=optunas).trials == study.trials
    finally:
        close(ours)
        close(optunas)


@pytest.mark.parametrize("damage", ["DROP TABLE trial_heartbeats", "DELETE FROM alembic_version"])
def test_tables_that_are_not_ready_are_made_so_by_optuna(ready: str, damage: str) -> None:
    database = Database(ready)
    with database.engine.begin() as connection:
        connection.execute(text(damage))
    rdb = open_optuna_tables(database)
    try:
        assert rdb.get_current_version() == rdb.get_head_version()
    finally:
        close(rdb)


def test_another_schema_is_refused(ready: str) -> None:
    database = Database(ready)
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'v9.0.0.a'"))
    with pytest.raises(StorageUrlError, match=r"schema v9\.0\.0\.a.*install a newer Optuna"):
        open_optuna_tables(database)
