"""A dry run refuses the databases that a search refuses, with the same words, and writes nothing into any."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest

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
