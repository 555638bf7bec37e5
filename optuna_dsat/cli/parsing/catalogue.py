"""The commands by name: their modules, and their order in the help.

A command's module is imported when the command is called, so commands do not wait for each other's dependencies.
"""

from __future__ import annotations

import importlib
from collections.abc import ItemsView, ValuesView
from typing import Any

import typer

from optuna_dsat.cli.parsing.help import HelpCommand, HelpGroup

COMMANDS: dict[str, tuple[str, str, str]] = {
    name: (panel, module, attribute)
    for panel, entries in {
        "Before a search": {
            "doctor": ("doctor", "doctor"),
            "plan": ("plan", "plan"),
        },
        "Search and train": {
            "tune": ("search", "tune_search"),
            "resume": ("resume", "resume"),
            "worker": ("resume", "worker"),
            "train": ("train", "train"),
            "run": ("search", "run_search"),
            "guided": ("search", "guided_search"),
            "asha": ("search", "asha_search"),
            "binary": ("search", "binary_search"),
            "random": ("search", "random_search"),
        },
        "Look at a result": {
            "show": ("studies", "show"),
            "best": ("studies", "best"),
            "trials": ("trials", "trials"),
            "explain": ("report", "explain"),
            "report": ("report", "report"),
            "dashboard": ("report", "dashboard"),
        },
        "Manage studies": {
            "studies": ("studies", "studies"),
            "export": ("trials", "export"),
            "delete": ("studies", "delete"),
            "db": ("studies", "database"),
        },
    }.items()
    for name, (module, attribute) in entries.items()
}
"""Name of a command, in the order of the help -> its group in the help, its module of ``optuna_dsat.cli``, and its
function or ``typer.Typer`` of further commands.
"""

SEARCHES = frozenset(name for name, (_, module, _) in COMMANDS.items() if module == "search")
"""Commands that search behind a training command."""

TAKE_LAUNCHER = SEARCHES | {"doctor"}
"""Commands whose options may be followed by a training command with its launcher."""


class Catalogue(HelpGroup):
    """The group of all commands; each is built on first access."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands({**COMMANDS, **self.commands})

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands without building them."""
        del ctx
        return list(self.commands)


class _Commands(dict[str, Any]):
    """Name -> command, or the entry of a command that is built on lookup."""

    def __getitem__(self, name: str) -> Any:
        command = super().__getitem__(name)
        if isinstance(command, tuple):
            command = self[name] = _build(name, *command)
        return command

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - the method itself

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)


def _build(name: str, panel: str, module: str, attribute: str) -> Any:
    """Import a command and return typer's command object."""
    result = getattr(importlib.import_module(f"optuna_dsat.cli.{module}"), attribute)
    if isinstance(result, typer.Typer):
        command = typer.main.get_command(result)
        command.name = name
    else:
        from optuna_dsat.cli.parsing.commands import first_options, option_classes, with_options

        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, cls=HelpCommand)(with_options(result) if option_classes(result) else result)
        command = typer.main.get_command(alone)
        assert isinstance(command, HelpCommand)
        command.first = first_options(result)
        command.takes_launcher = name in TAKE_LAUNCHER
    command.rich_help_panel = panel  # type: ignore[attr-defined]
    return command
