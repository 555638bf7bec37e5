"""A study that this version cannot read hides no other one, and is named with what cannot be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from optuna_dsat.store import Store
from tests.harness.entry_points import Ended, Run, run_here
from tests.harness.landscapes import Hill
from tests.harness.studies import StudyBench

__all__ = ["run_here"]

UNREADABLE = 5


@pytest.fixture(scope="module")
def two_studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with two finished studies, ``good`` and ``bad``; not to be changed."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "train.py").write_text("")
    with Store.open(f"sqlite:///{folder / 'study.db'}") as store:
        bench = StudyBench(folder, store)
        for name in ("good", "bad"):
            bench.run(bench.spec(name=name, max_trials=3, confirm=1), Hill())
    return folder / "study.db"


class Altered:
    """A copy of the database, of whose study ``bad`` something is changed."""

    def __init__(self, url: str, run: Run) -> None:
        self._url = url
        self._run = run

    def __call__(self, *arguments: str) -> Ended:
        return self._run(*arguments, "--storage", self._url)

    def execute(self, query: str, **values: Any) -> None:
        """Change rows."""
        engine = create_engine(self._url)
        try:
            with engine.begin() as connection:
                assert connection.execute(text(query), values).rowcount > 0
        finally:
            engine.dispose()

    def spec(self, **changes: Any) -> None:
        engine = create_engine(self._url)
        with engine.connect() as connection:
            result = connection.execute(text("SELECT spec FROM dsat_studies WHERE name = 'bad'")).scalar_one()
        engine.dispose()
        spec = json.loads(result) if isinstance(result, str) else result
        self.execute("UPDATE dsat_studies SET spec = :spec WHERE name = 'bad'", spec=json.dumps({**spec, **changes}))


@pytest.fixture
def altered(two_studies: Path, tmp_path: Path, run_here: Run) -> Altered:
    shutil.copy(two_studies, tmp_path / "study.db")
    return Altered(f"sqlite:///{tmp_path / 'study.db'}", run_here)


def test_it_is_listed_as_such_beside_the_others(altered: Altered) -> None:
    altered.execute("""UPDATE dsat_studies SET versions = '{"optuna-dsat": "9.1"}' WHERE name = 'bad'""")
    altered.spec(of_a_newer_version=1)
    listed = altered("studies")
    assert listed.returncode == 0, listed.stderr
    assert "good" in listed.stdout
    assert "bad cannot be read: " in listed.stdout
    rows = json.loads(altered("studies", "--json").stdout)
    assert rows[0]["study"] == "good"
    assert rows[0]["best"] is not None
    assert set(rows[1]) == {"study", "unreadable"}
    checked = altered("db", "check")
    assert checked.returncode == UNREADABLE
    assert checked.stdout.startswith("current\nbad cannot be read: ")
    for command in ("resume", "trials", "best", "export", "explain", "report", "show"):
        ended = altered(command, "bad")
        assert ended.returncode == UNREADABLE, (command, ended.stderr)
        assert len(ended.stderr.strip().splitlines()) == 1, (command, ended.stderr)
        assert ended.stderr.startswith("optuna-dsat: The study 'bad' cannot be read: ")
        assert "its spec: of_a_newer_version" in ended.stderr
        assert "(made by optuna-dsat 9.1)" in ended.stderr
    assert altered("show", "good").returncode == 0
    assert altered("delete", "bad", "--yes").returncode == 0
    assert altered("db", "check").returncode == 0
