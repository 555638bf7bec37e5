"""The commands by name: their modules, and their order in the help.

A command's module is imported when the command is called, so commands do not wait for each other's dependencies.
"""

from __future__ import annotations

import importlib
from collections.abc import ItemsView, ValuesView
from dataclasses import dataclass
from typing import Any

import typer

from optuna_dsat.cli.parsing.help import HelpCommand, HelpGroup

_BEFORE = "Before a search"
_SEARCH = "Search and train"
_LOOK = "Look at a result"
_MANAGE = "Manage studies"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Location of a command's definition."""

    module: str
    """Module of ``optuna_dsat.cli``."""
    attribute: str
    """A function, or a ``typer.Typer`` of further commands."""
    panel: str
    """Group of commands in the help."""


COMMANDS: dict[str, _Entry] = {
    name: _Entry(module=module, attribute=attribute, panel=panel)
    for panel, entries in {
        _BEFORE: (
            ("doctor", "doctor", "doctor"),
            ("check", "doctor", "check"),
            ("plan", "plan", "plan"),
            ("init", "init", "init"),
        ),
        _SEARCH: (
            ("guided", "search", "guided_search"),
            ("asha", "search", "asha_search"),
            ("binary", "search", "binary_search"),
            ("random", "search", "random_search"),
            ("tune", "search", "tune_search"),
            ("run", "search", "run_search"),
            ("resume", "resume", "resume"),
            ("worker", "resume", "worker"),
            ("train", "train", "train"),
        ),
        _LOOK: (
            ("show", "studies", "show"),
            ("best", "studies", "best"),
            ("trials", "trials", "trials"),
            ("explain", "report", "explain"),
            ("report", "report", "report"),
            ("dashboard", "report", "dashboard"),
        ),
        _MANAGE: (
            ("studies", "studies", "studies"),
            ("export", "trials", "export"),
            ("delete", "studies", "delete"),
            ("db", "studies", "database"),
        ),
    }.items()
    for name, module, attribute in entries
}
"""Name of a command -> its definition, in the order of the help."""

SEARCHES = frozenset(name for name, entry in COMMANDS.items() if entry.module == "search")
"""Commands that take a training command."""


_TAKE_COMMAND = ("check",)
"""Commands whose options precede their arguments, which end with a training command."""


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
        if isinstance(command, _Entry):
            command = self[name] = _build(name, command)
        return command

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - the method itself

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)


def _build(name: str, entry: _Entry) -> Any:
    """Import a command and return typer's command object."""
    result = getattr(importlib.import_module(f"optuna_dsat.cli.{entry.module}"), entry.attribute)
    if isinstance(result, typer.Typer):
        command = typer.main.get_command(result)
        command.name = name
    else:
        from optuna_dsat.cli.parsing.commands import first_options, takes_options, with_options

        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, cls=HelpCommand)(with_options(result) if takes_options(result) else result)
        command = typer.main.get_command(alone)
        assert isinstance(command, HelpCommand)
        command.first = first_options(result)
        command.takes_launcher = name in SEARCHES
        command.allow_interspersed_args = name not in _TAKE_COMMAND
    command.rich_help_panel = entry.panel  # type: ignore[attr-defined]
    return command
