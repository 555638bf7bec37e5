"""``check``: find errors in a DeepSpeed config, without a launch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from optuna_dsat.cli.doctor import print_findings
from optuna_dsat.cli.parsing.parameters import option
from optuna_dsat.cli.tables import notify
from optuna_dsat.errors import ConfigError
from optuna_dsat.escape.terminal import say_prose

__all__ = ["check"]

_FILLING = frozenset({"transformers", "trl", "accelerate", "lightning", "pytorch_lightning", "json", "yaml", "hjson"})
"""Packages that fill in "auto", or that a script uses to fill it in."""


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The DeepSpeed config (JSON).", show_default=False)],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]...",
            help="The command that trains with it: its ranks and the script's options are compared with the config.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[str | None, option("--python", help="Python of the script, which has DeepSpeed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is wrong with a DeepSpeed config, all at once and without a launch; exit with 2 if anything is."""
    from optuna_dsat.config.user_file import read
    from optuna_dsat.doctor.config_check import check as findings_of
    from optuna_dsat.doctor.finding import Status, to_json
    from optuna_dsat.script.interpreter import named_python, script_python

    raw = read(config)
    words = [word for at, word in enumerate(command or ()) if at or word != "--json"]
    as_json = as_json or words != list(command or ())
    use = _use_of(words, config=config, python=None if python is None else named_python(python))
    use["python"] = script_python(python or use.get("python")) or sys.executable
    notify("Loading torch and DeepSpeed, which takes some seconds.")
    findings = findings_of(raw, **use)
    wrong = sum(finding.status in (Status.FATAL, Status.PROBLEM) for finding in findings)
    if as_json:
        print(json.dumps({"usable": not wrong, "findings": to_json(findings)["findings"]}, indent=2))
    else:
        print_findings(findings)
    if wrong:
        raise typer.Exit(ConfigError.exit_code)
    if not as_json:
        say_prose(f"{config}: nothing is wrong.")


def _use_of(words: Sequence[str], *, config: Path, python: str | None) -> dict[str, Any]:
    """Return the information about its config in a training command: keywords of ``config_check.check``."""
    if not words:
        return {}
    from optuna_dsat.script.command.launch_command import LaunchCommand, read_command
    from optuna_dsat.script.command.own_ranks import imported_packages, starts_own_ranks
    from optuna_dsat.script.settings_file import find_config

    cwd = Path.cwd()
    command = read_command(words, cwd=cwd, python=python, on_notice=notify)
    if command is None:
        command = LaunchCommand(script=words[0], args=tuple(words[1:]))
    folder = Path(command.folder or cwd)
    named = command.config or find_config(command.args, cwd=folder)
    if named is not None and (folder / named).resolve() != config.resolve():
        notify(f"The command trains with {named}, and {config} is checked.")
    packages = imported_packages(command.script, is_module=command.is_module, cwd=folder, python=command.python)
    alone = command.without_launcher and not starts_own_ranks(
        command.script, is_module=command.is_module, cwd=folder, python=command.python
    )
    arguments = _arguments(command.args)
    by_trainer = isinstance(arguments.get("deepspeed"), str)  # DeepSpeed's option of this name has no value
    return {
        "python": command.python,
        "ranks": 1 if alone else None if command.ranks is None else command.ranks * command.nodes,
        "fills_auto": True if by_trainer else None if packages & _FILLING or "deepspeed" not in packages else False,
        "trainer_arguments": arguments if by_trainer else None,
    }


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a script by name; true for an option without a value."""
    result: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            text = value if equals else "true" if following.startswith("--") else following
            try:
                result[name] = json.loads(text.lower())
            except ValueError:
                result[name] = text
    return result
