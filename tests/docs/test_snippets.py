"""What the pages tell their readers to type is what the command and the package understand."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import typer
from typer.core import TyperGroup

from optuna_dsat.cli import app
from optuna_dsat.cli.parsing.launch_prefix import unfold_command
from optuna_dsat.cli.parsing.options_file import OptionsFile
from optuna_dsat.cli.parsing.rewriting import COUNTS, lift_option, spread_numbers
from tests.harness.entry_points import EntryPointBench, bench
from tests.harness.interceptor import intercept_here

__all__ = ["bench"]

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*/README.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_LITERAL = re.compile(r"\b(SCRIPT|DS_CONFIG|STUDY|COMMAND|N)\b|\.\.\.")


def blocks(language: str, page: Path) -> list[str]:
    return [code for result, code in FENCE.findall(page.read_text(encoding="utf-8")) if result == language]


def commands(page: Path) -> Iterator[str]:
    """Yield the ``optuna-dsat`` commands of a page: in blocks, indented, and in the middle of a sentence."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    yield from re.findall(r"^(?: {4})?(optuna-dsat .*)$", text, re.MULTILINE)
    yield from (" ".join(result.split()) for result in re.findall(r"`(optuna-dsat [^`]*)`", text))


ALL = {command: str(page.relative_to(ROOT)) for page in PAGES for command in commands(page)}
"""Command -> a page that has it."""
root = cache(partial(typer.main.get_command, app))


@pytest.fixture(autouse=True)
def launchers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optuna_dsat.script.command.launch_command.intercept", intercept_here)


def parse(arguments: list[str]) -> None:
    """Parse a command line without running anything."""
    group: Any = root()
    arguments = lift_option(spread_numbers(arguments, *COUNTS), "--options")
    arguments = list(unfold_command(arguments, group, cwd=ROOT).arguments)
    context = group.make_context("optuna-dsat", arguments)
    while isinstance(group, TyperGroup):
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None, name
        group, context = command, command.make_context(name, rest, parent=context)


def test_there_are_commands_to_check() -> None:
    assert len(ALL) > 40


@pytest.mark.parametrize("command", sorted(ALL))
def test_a_command_is_understood(command: str) -> None:
    words = shlex.split(re.sub(r"\s+(#|>|&&).*", "", command))[1:]
    if NOT_LITERAL.search(command) or "|" in command or len(words) == 1 or "--help" in words:
        # A form, or the mere name of a command or option: what it names must exist.
        known = {name.split()[1] for name in _names()} | {option for param in root().params for option in param.opts}
        assert set(words[0].split("|")) - {"COMMAND", "..."} <= known, ALL[command]
        return
    parse(words)


@cache
def _names() -> list[str]:
    from docs.generate.options import commands as all_commands

    return [name for name, _ in all_commands()]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("python", page)], ids=lambda page: page.name)
def test_python_runs_from_the_top_of_the_page_to_its_end(
    page: Path, bench: EntryPointBench, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.folder / "ds.json").rename(bench.folder / "ds_config.json")
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(blocks("python", page)):
        exec(compile(code, f"{page.name}[{number}]", "exec"), namespace)
    optuna.logging.set_verbosity(verbosity)
    assert "samples/s" in capsys.readouterr().out


@pytest.mark.parametrize("place", [0, 1])
def test_files_of_options_hold_options(place: int) -> None:
    text = list(blocks("toml", ROOT / "docs" / "reference" / "shell.md"))[place]
    table = tomllib.loads(text)
    table = table["tool"]["optuna-dsat"] if place == 0 else table
    group: Any = root()
    context = group.make_context("optuna-dsat", ["studies"])
    defaults = OptionsFile(path=Path("shown"), table=table).default_map(group, context)
    assert defaults["asha"]["divisor"] == 3
    assert defaults["random"]["max_trials"] == 40
