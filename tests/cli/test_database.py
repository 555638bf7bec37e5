"""``db`` leaves databases alone in which optuna-dsat has nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest

from tests.harness.entry_points import Run, run_here

__all__ = ["run_here"]


def make_shop(path: Path) -> None:
    with closing(sqlite3.connect(path)) as shop:
        shop.execute("CREATE TABLE goods (id INTEGER PRIMARY KEY)")


def make_optunas(path: Path) -> None:
    optuna.create_study(storage=f"sqlite:///{path}")


@pytest.mark.parametrize("make", [make_shop, make_optunas])
def test_a_database_of_others_is_neither_upgraded_nor_changed(
    run_here: Run, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    file = tmp_path / "others.db"
    make(file)
    before = file.read_bytes()
    done = run_here("db", "upgrade", "--storage", f"sqlite:///{file}")
    assert done.returncode == 2
    assert "nothing to upgrade in the database" in done.stderr
    for command in ("current", "check"):
        done = run_here("db", command, "--storage", f"sqlite:///{file}")
        assert (done.returncode, done.stdout) == (0, "new\n")
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_no_database_is_made_by_an_upgrade(run_here: Run, tmp_path: Path) -> None:
    done = run_here("db", "upgrade", "--storage", f"sqlite:///{tmp_path / 'typo.db'}")
    assert done.returncode == 2
    assert "There is no database" in done.stderr
    assert not list(tmp_path.iterdir())
