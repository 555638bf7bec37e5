"""A study that this version cannot read hides no other one, and is named with what cannot be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from optuna_dsat.store import Store
from tests.harness.databases import Server
from tests.harness.entry_points import Ended, Run, run_here
from tests.harness.landscapes import Hill
from tests.harness.studies import StudyBench

__all__ = ["run_here"]

UNREADABLE = 5


def two_studies_in(url: str, folder: Path) -> None:
    """Run two studies, ``good`` and ``bad``, to their ends."""
    (folder / "train.py").write_text("")
    with Store.open(url) as store:
        bench = StudyBench(folder, store)
        for name in ("good", "bad"):
            bench.run(bench.spec(name=name, max_trials=3, confirm=1), Hill())


@pytest.fixture(scope="module")
def two_studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with two finished studies; not to be changed."""
    folder = tmp_path_factory.mktemp("two")
    two_studies_in(f"sqlite:///{folder / 'study.db'}", folder)
    return folder / "study.db"


@pytest.fixture(scope="module")
def two_studies_on_a_server(postgres_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL database with two finished studies; not to be changed."""
    url = postgres_server.new_database()
    two_studies_in(url, tmp_path_factory.mktemp("two-on-a-server"))
    yield url
    postgres_server.drop_database(url)


class Altered:
    """A copy of the database, of whose study ``bad`` something is changed."""

    def __init__(self, url: str, run: Run) -> None:
        self.on_a_server = not url.startswith("sqlite")
        self._url = url
        self._run = run

    def __call__(self, *arguments: str) -> Ended:
        return self._run(*arguments, "--storage", self._url)

    def execute(self, query: str, **values: Any) -> None:
        """Change rows.

        Raises:
            DBAPIError: If the database itself refuses the value: PostgreSQL keeps to the types of its columns.
        """
        engine = create_engine(self._url)
        try:
            with engine.begin() as connection:
                assert connection.execute(text(query), values).rowcount > 0
        finally:
            engine.dispose()

    def spec(self, **changes: Any) -> None:
        engine = create_engine(self._url)
        with engine.connect() as connection:
            found = connection.execute(text("SELECT spec FROM dsat_studies WHERE name = 'bad'")).scalar_one()
        engine.dispose()
        spec = json.loads(found) if isinstance(found, str) else found
        self.execute("UPDATE dsat_studies SET spec = :spec WHERE name = 'bad'", spec=json.dumps({**spec, **changes}))

    def trial_attribute(self, key: str, value: str) -> None:
        self.execute(
            "UPDATE trial_user_attributes SET value_json = :value WHERE key = :key AND trial_id IN (SELECT trial_id"
            " FROM trials JOIN studies USING (study_id) WHERE study_name = 'bad')",
            value=value,
            key=key,
        )

    def study_attribute(self, key: str, value: str) -> None:
        self.execute(
            "UPDATE study_user_attributes SET value_json = :value WHERE key = :key AND study_id ="
            " (SELECT study_id FROM studies WHERE study_name = 'bad')",
            value=value,
            key=key,
        )

    def in_trials(self, change: str) -> None:
        """Change rows that belong to trials."""
        self.execute(
            f"{change} WHERE trial_id IN (SELECT trial_id FROM trials JOIN studies USING (study_id)"
            " WHERE study_name = 'bad')"
        )

    def launch(self, column: str, value: Any) -> None:
        self.execute(
            f"UPDATE dsat_launches SET {column} = :value WHERE study_uuid ="
            " (SELECT uuid FROM dsat_studies WHERE name = 'bad') AND launch_id = 'trial-0000'",
            value=value,
        )


@pytest.fixture
def in_a_file(two_studies: Path, tmp_path: Path, run_here: Run) -> Altered:
    shutil.copy(two_studies, tmp_path / "study.db")
    return Altered(f"sqlite:///{tmp_path / 'study.db'}", run_here)


@pytest.fixture
def on_a_server(two_studies_on_a_server: str, postgres_server: Server, run_here: Run) -> Iterator[Altered]:
    url = postgres_server.new_database(template=make_url(two_studies_on_a_server).database)
    yield Altered(url, run_here)
    postgres_server.drop_database(url)


@pytest.fixture(params=["in_a_file", pytest.param("on_a_server", marks=pytest.mark.postgres)])
def altered(request: pytest.FixtureRequest) -> Altered:
    found: Altered = request.getfixturevalue(request.param)
    return found


DAMAGES: dict[str, Callable[[Altered], None]] = {
    "a field of a newer version": lambda db: db.spec(of_a_newer_version=1),
    "a metric of a newer version": lambda db: db.spec(metric="joules"),
    "an option that follows nothing": lambda db: db.spec(
        script={"script": "/train.py", "cwd": "/", "config_path": "", "arg_mappings": {"moon": "--moon"}}
    ),
    "a spec of another study": lambda db: db.spec(name="../bad"),
    "a spec that is no JSON": lambda db: db.execute("UPDATE dsat_studies SET spec = '{' WHERE name = 'bad'"),
    "a spec that is a list": lambda db: db.execute("UPDATE dsat_studies SET spec = '[]' WHERE name = 'bad'"),
    "a date that is text": lambda db: db.execute("UPDATE dsat_studies SET created_at = 'x' WHERE name = 'bad'"),
    "an outcome of a newer version": lambda db: db.trial_attribute("outcome", '"evaporated"'),
    "an outcome that is a list": lambda db: db.trial_attribute("outcome", "[]"),
    "a config that is text": lambda db: db.trial_attribute("config", '"x"'),
    "a stage that there is not": lambda db: db.trial_attribute("config", '{"zero_optimization": {"stage": "<b>"}}'),
    "a micro-batch that is text": lambda db: db.trial_attribute("config", '{"train_micro_batch_size_per_gpu": "x"}'),
    "metrics that are text": lambda db: db.trial_attribute("metrics", '"x"'),
    "a message that is a number": lambda db: db.trial_attribute("message", "1"),
    "a measured trial without a value": lambda db: db.in_trials("DELETE FROM trial_values"),
    "a measured trial without its parameters": lambda db: db.in_trials("DELETE FROM trial_params"),
    "an attribute that is no JSON": lambda db: db.trial_attribute("message", "{"),
    "a launch outside of the folder": lambda db: db.trial_attribute("launch_id", '"../../../etc"'),
    "peak memory that is text": lambda db: db.trial_attribute("peak_memory_bytes", '"x"'),
    "rounds without launches": lambda db: db.study_attribute("confirmation", "{}"),
    "a finalist that is no trial": lambda db: db.study_attribute(
        "confirmation", '{"chosen": [77], "measured": 1, "since": 1, "launches": []}'
    ),
    "a round of a newer version": lambda db: db.study_attribute(
        "confirmation", '{"chosen": [], "measured": 1, "since": 1, "launches": [{"number": 0, "moon": "full"}]}'
    ),
    "rounds that are no JSON": lambda db: db.study_attribute("confirmation", "{"),
    "a profile's name that is a list": lambda db: db.study_attribute("profile_fingerprint", "[]"),
    "a launch's outcome of a newer version": lambda db: db.launch("outcome", "evaporated"),
    "a launch's time that is text": lambda db: db.launch("started_at", "noon"),
    "a launch's name with a path": lambda db: db.launch("launch_id", "../../etc"),
    "conditions of a launch of another kind": lambda db: db.launch("conditions", '{"throttle_reasons": 7}'),
    "a launch's devices that are no JSON": lambda db: db.launch("devices", "["),
}
REFUSED_BY_A_SERVER = {
    "a spec that is no JSON",
    "a date that is text",
    "a launch's time that is text",
    "a launch's devices that are no JSON",
}
"""What no column of PostgreSQL takes."""
ON_A_SERVER = (
    *sorted(REFUSED_BY_A_SERVER),
    "a field of a newer version",
    "an attribute that is no JSON",
    "a measured trial without a value",
    "rounds without launches",
    "a launch's outcome of a newer version",
)
"""What is damaged there, too: each table, and each type of column."""
COMMANDS = ("resume", "trials", "best", "export", "explain", "report")
"""Read a study by the same means as ``show``; each meets some of the damages."""


@pytest.mark.parametrize(
    ("altered", "damage"),
    [
        *(("in_a_file", damage) for damage in DAMAGES),
        *(pytest.param("on_a_server", damage, marks=pytest.mark.postgres) for damage in ON_A_SERVER),
    ],
    indirect=["altered"],
)
def test_it_is_listed_as_such_beside_the_others(altered: Altered, damage: str) -> None:
    if altered.on_a_server and damage in REFUSED_BY_A_SERVER:
        with pytest.raises(DBAPIError):
            DAMAGES[damage](altered)
        return
    DAMAGES[damage](altered)
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
    command = COMMANDS[[*DAMAGES].index(damage) % len(COMMANDS)]
    ended = altered(command, "bad")
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 1, (command, ended.stderr)
    assert ended.returncode in (0, UNREADABLE), (command, ended.stderr)
    shown = altered("show", "bad")
    assert shown.returncode == UNREADABLE
    assert shown.stderr.startswith("optuna-dsat: The study 'bad' cannot be read: ")
    assert len(shown.stderr) < 1000
    assert altered("show", "good").returncode == 0


@pytest.mark.parametrize("name", ["a field of a newer version", "a spec that is a list"])
def test_it_can_be_deleted(altered: Altered, name: str) -> None:
    DAMAGES[name](altered)
    assert altered("delete", "bad", "--yes").returncode == 0
    assert altered("db", "check").returncode == 0


@pytest.mark.parametrize(
    ("table", "column"),
    [("trials", "datetime_complete"), ("trials", "state"), ("trial_values", "value_type"),
     ("study_directions", "direction")],
)  # fmt: skip
def test_one_whose_trials_cannot_be_read_can_be_deleted(in_a_file: Altered, table: str, column: str) -> None:
    in_a_file.execute(f"UPDATE {table} SET {column} = 'noon'")
    done = in_a_file("delete", "bad", "--yes")
    assert done.returncode == 0, done.stderr
    assert [row["study"] for row in json.loads(in_a_file("studies", "--json").stdout)] == ["good"]


def test_the_version_that_made_it_is_named(altered: Altered) -> None:
    altered.execute("""UPDATE dsat_studies SET versions = '{"optuna-dsat": "9.1"}' WHERE name = 'bad'""")
    altered.spec(of_a_newer_version=1)
    shown = altered("show", "bad").stderr
    assert "its spec: of_a_newer_version" in shown
    assert "(made by optuna-dsat 9.1)" in shown


def test_a_profile_that_is_none_is_named(altered: Altered) -> None:
    altered.execute("UPDATE dsat_profiles SET profile = '{}'")
    listed = altered("studies").stdout
    assert "bad cannot be read: its profile" in listed
    assert "good cannot be read: its profile" in listed
