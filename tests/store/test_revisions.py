"""The newest revision as it is read from the files is what Alembic says."""

from __future__ import annotations

from pathlib import Path

import optuna
from alembic.config import Config
from alembic.script import ScriptDirectory

from optuna_dsat.store.migrate import head, migrations_path, newest_revision


def alembics(folder: Path) -> str | None:
    config = Config()
    config.set_main_option("script_location", str(folder))
    return ScriptDirectory.from_config(config).get_current_head()


def test_ours_and_optunas_are_those_of_alembic() -> None:
    optunas = Path(optuna.storages.__file__).parent / "_rdb" / "alembic"
    assert newest_revision(optunas / "versions") == alembics(optunas)
    assert head() == newest_revision(migrations_path() / "versions") == alembics(migrations_path())


def test_two_newest_ones_or_none_are_no_answer(tmp_path: Path) -> None:
    assert newest_revision(tmp_path) is None
    (tmp_path / "a.py").write_text("revision = 'a'\ndown_revision = None\n")
    assert newest_revision(tmp_path) == "a"
    (tmp_path / "b.py").write_text("revision: str = 'b'\ndown_revision: str = 'a'\n")
    assert newest_revision(tmp_path) == "b"
    (tmp_path / "c.py").write_text("revision = 'c'\ndown_revision = 'a'\n")
    assert newest_revision(tmp_path) is None
    (tmp_path / "d.py").write_text("revision = 'd'\ndown_revision = ('b', 'c')\n")
    assert newest_revision(tmp_path) == "d"
    (tmp_path / "e.py").write_text("revision = \n")
    assert newest_revision(tmp_path) is None
