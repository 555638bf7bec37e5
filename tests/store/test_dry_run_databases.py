"""A dry run refuses the databases that a search refuses, with the same words, and writes nothing into any."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest

from optuna_dsat.errors import StorageUrlError
from optuna_dsat.store import Store, has_our_tables
from tests.harness.entry_points import bench, leave

__all__ = ["bench"]

FILE = Path("tuning.db")
SEARCH = ("random", "train.py", "ds.json", "--cpu-ranks", "2", "--max-trials", "1", "--confirm", "0", "--study", "s")


def tables(*statements: str) -> None:
    with closing(sqlite3.connect(FILE)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def of_optuna(revision: str) -> None:
    optuna.storages.RDBStorage(f"sqlite:///{FILE}").engine.dispose()
    tables(f"UPDATE alembic_version SET version_num = '{revision}'")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a table of another's": (lambda: tables("CREATE TABLE studies (title TEXT)"), "belongs to another application"),
    "migrations of another's": (
        lambda: tables("CREATE TABLE alembic_version (version_num TEXT)", "INSERT INTO alembic_version VALUES ('1f')"),
        "belongs to another application: its table 'alembic_version'",
    ),
    "a newer Optuna's": (lambda: of_optuna("v9.0.0.a"), "install a newer Optuna"),
    "an older Optuna's": (lambda: of_optuna("v3.0.0.a"), "run: optuna storage upgrade"),
}


def search(*arguments: str) -> int:
    return leave(*SEARCH, "--storage", f"sqlite:///{FILE}", *arguments)


def content() -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path().rglob("*")) if p.is_file()}


def dump() -> list[str]:
    if not FILE.is_file():
        return []
    with closing(sqlite3.connect(FILE)) as connection:
        return [*connection.iterdump()]


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(("made", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_a_search_refuses(made: Callable[[], object], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    made()
    before, stored = content(), dump()
    assert search("--dry-run") == 2
    words = capsys.readouterr().err
    assert reason in words
    assert content() == before
    assert search() == 2
    assert capsys.readouterr().err == words
    assert dump() == stored, "a search refuses it before it makes tables"


@pytest.mark.usefixtures("bench")
def test_a_search_takes_a_database_with_tables_of_other_names() -> None:
    tables("CREATE TABLE users (name TEXT)")
    before = content()
    assert search("--dry-run") == 0
    assert content() == before
    assert search() == 0


@pytest.fixture
def with_a_study() -> str:
    """A database of Optuna's alone in the working directory, with a study of another's."""
    url = f"sqlite:///{FILE}"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=url, study_name="theirs")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]
    return url


@pytest.mark.usefixtures("bench")
def test_a_dry_run_writes_nothing_into_a_database_of_others(with_a_study: str) -> None:
    assert not has_our_tables(with_a_study)
    before = content()
    assert leave(*SEARCH, "--dry-run", "--storage", with_a_study) == 0
    assert leave(*SEARCH[:-4], "--study", "theirs", "--dry-run", "--storage", with_a_study) == 2
    for command in (("studies",), ("show", "theirs"), ("resume", "theirs"), ("delete", "theirs", "--yes")):
        assert leave(*command, "--storage", with_a_study) == 2
    assert content() == before
    with pytest.raises(StorageUrlError, match="no study of optuna-dsat"):
        Store.open(with_a_study, create=False)
    assert leave(*SEARCH, "--storage", with_a_study) == 0, "a search adds its tables"
    assert has_our_tables(with_a_study)
    assert leave(*SEARCH, "--dry-run", "--storage", with_a_study) == 0
