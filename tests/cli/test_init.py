"""``init``: the option file of a project, which a search then reads."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from optuna_dsat.cli import app
from optuna_dsat.cli.init import TABLE
from optuna_dsat.cli.parsing.options_file import OptionsFile
from tests.harness.entry_points import Run, run_here

__all__ = ["run_here"]


def test_the_second_time_it_refuses_and_changes_nothing(run_here: Run, tmp_path: Path) -> None:
    first = run_here("init")
    assert (first.returncode, first.stdout) == (0, "pyproject.toml\n")
    text = (tmp_path / "pyproject.toml").read_text()
    assert text == TABLE
    again = run_here("init")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "optuna-dsat: pyproject.toml has a table [tool.optuna-dsat] already.\n"
    assert (tmp_path / "pyproject.toml").read_text() == text
    assert run_here("studies", "--storage", "sqlite:///none.db").returncode == 2  # reads the file


@pytest.mark.parametrize("old", ["[project]\nname = 'x'  # mine", "# mine\r\n[tool.ruff]\r\nline-length = 99\r\n"])
def test_what_the_file_holds_is_left_as_it_is(run_here: Run, tmp_path: Path, old: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_bytes(old.encode())
    file.chmod(0o640)
    assert run_here("init").returncode == 0
    text = file.read_bytes().decode()
    assert text.startswith(old)
    assert (text.count("\r\n") == text.count("\n")) is ("\r\n" in old)
    assert tomllib.loads(text)["tool"]["optuna-dsat"] == {}
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("old", ["tool = {ruff = {}}\n", "not TOML", "tool = 3\n"])
def test_a_file_that_cannot_be_extended_is_refused_in_one_line(run_here: Run, tmp_path: Path, old: str) -> None:
    (tmp_path / "pyproject.toml").write_text(old)
    done = run_here("init")
    assert done.returncode == 2
    assert done.stderr.startswith("optuna-dsat: pyproject.toml cannot be extended")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "pyproject.toml").read_text() == old


def test_every_option_of_the_table_is_one_of_a_command_with_a_valid_value() -> None:
    lines = [line for line in TABLE.splitlines() if line.startswith("# ")]
    table = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines))
    assert len(table) == len(lines) > 9
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    context = typer.Context(root)
    defaults = OptionsFile(path=Path("pyproject.toml"), table=table).default_map(root, context)
    assert {re.sub("-", "_", name) for name in table} - {"log"} <= defaults["tune"].keys()
