"""Writes ``docs/reference/options.md``: every command, argument and option, from the commands themselves.

python -m docs.generate.options
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from optuna_dsat.cli import app
from optuna_dsat.cli.parsing.help import placeholder, shown_default

PAGE = Path(__file__).resolve().parents[1] / "reference" / "options.md"
SEARCHES = ("random", "binary", "asha", "guided", "tune", "run")
"""Commands that search; the options that they share get one section."""

_HEAD = """# Commands and options

<!-- Written by `python -m docs.generate.options`; do not edit. -->

`optuna-dsat COMMAND --help-all` shows the same; `--help` of a search shows the options that matter most. How options
come from the environment and from files, what goes to which stream and what exit codes mean is in [The command in a
shell](shell.md).
"""
_SHARED = """## Options of every search

`{commands}` share these. Arguments after `--` go to the script. As keywords of
{py:func}`optuna_dsat.tune` they have the same names, with `_` for `-`, and the same defaults.
"""


def commands() -> Iterator[tuple[str, TyperCommand]]:
    """Yield every command with its full name, in the order of ``--help``."""
    root = typer.main.get_command(app)
    if not isinstance(root, TyperGroup):
        raise TypeError("optuna-dsat is a group of commands")
    yield from _walk(root, "optuna-dsat")


def _walk(group: TyperGroup, path: str) -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from _walk(command, f"{path} {name}")
        elif isinstance(command, TyperCommand):
            yield f"{path} {name}", command


def page() -> str:
    """Return the page."""
    found = dict(commands())
    searches = [found[f"optuna-dsat {name}"] for name in SEARCHES]
    shared = [
        option
        for option in _options(searches[0])
        if all(option.opts in [other.opts for other in _options(command)] for command in searches)
    ]
    parts = [_HEAD, "## Options before the command\n", _table(_root_options())]
    parts += [_SHARED.replace("{commands}", "`, `".join(SEARCHES)), _arguments(searches[0]), _by_panel(shared)]
    names = {name for option in shared for name in option.opts}
    for name, command in found.items():
        own = [option for option in _options(command) if not (_is_search(name) and set(option.opts) & names)]
        parts.append(f"## {name}\n\n{_text(command.help or '')}\n")
        if _is_search(name):
            parts.append(
                "Takes the [options of every search](#options-of-every-search)" + (" and:\n" if own else ".\n")
            )
        else:
            parts.append(_arguments(command))
        parts.append(_table(own))
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _is_search(name: str) -> bool:
    return name.removeprefix("optuna-dsat ") in SEARCHES


def _root_options() -> list[TyperOption]:
    root = typer.main.get_command(app)
    return [param for param in root.params if isinstance(param, TyperOption)]


def _options(command: TyperCommand) -> list[TyperOption]:
    return [param for param in command.params if isinstance(param, TyperOption) and not param.hidden]


def _by_panel(options: Sequence[TyperOption]) -> str:
    panels: dict[str, list[TyperOption]] = {}
    for option in options:
        panels.setdefault(str(option.rich_help_panel or "Options"), []).append(option)
    return "\n".join(f"### {panel}\n\n{_table(own)}" for panel, own in panels.items())


def _arguments(command: TyperCommand) -> str:
    arguments = [param for param in command.params if isinstance(param, TyperArgument)]
    rows = [f"| `{param.metavar or str(param.name).upper()}` | {_text(param.help or '')} |" for param in arguments]
    return "\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n" if rows else ""


def _table(options: Sequence[TyperOption]) -> str:
    rows = [f"| {_names(option)} | {_meaning(option)} | {_default(option)} |" for option in options]
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows]) + "\n" if rows else ""


def _names(option: TyperOption) -> str:
    """Return all spellings of an option with the placeholder of its value."""
    shown = placeholder(option).replace("|", r"\|")  # within a table
    value = f" {shown}" if shown else ""
    spellings = sorted(option.opts, key=len) + list(option.secondary_opts)
    return ", ".join(f"`{name}{value}`" for name in spellings)


_STATED_DEFAULT = re.compile(r"\s*\\?\[(default[^:]*): (.*)\]$")


def _meaning(option: TyperOption) -> str:
    text = _STATED_DEFAULT.sub("", option.help or "")
    variable = f" Environment: `{option.envvar}`." if option.envvar else ""
    return _text(text) + variable


def _default(option: TyperOption) -> str:
    stated = _STATED_DEFAULT.search(option.help or "")
    if stated is not None:
        condition = stated.group(1).removeprefix("default").strip()
        return _text(stated.group(2)) + (f" ({condition})" if condition else "")
    default = shown_default(option)
    return default if option.is_flag or not default else f"`{default}`"


def _text(text: str) -> str:
    """Return help text as Markdown, its special characters escaped."""
    return re.sub(r"([*_|<>\[\]])", r"\\\1", " ".join(text.replace("\\[", "[").split()))


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
