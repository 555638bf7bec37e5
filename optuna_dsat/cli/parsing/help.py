"""Help of the commands: plain text, the most important options first, and commands in groups.

``--help`` shows the options that a command declares as its first options, ``--help-all`` shows all.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from optuna_dsat.cli.parsing.rewriting import at_home

_ALL = "--help-all"
HELP_NAMES = ("--help", "-h", _ALL)
"""Spellings of the help option, for every command."""
_WANTS_ALL = "optuna_dsat.help_all"
_WIDEST = 100
"""Maximum width of the help in characters."""
_NARROWEST = 40
_LEFT = 28
"""Maximum width of the left column (names and placeholders); longer entries get a separate line."""
_OTHERS = "Options"
_COMMANDS = "Commands"
_PLACEHOLDERS = {"int": "N", "float": "X", "Path": "PATH"}
"""Type of a value -> placeholder."""


def placeholder(param: TyperOption) -> str:
    """Return the placeholder of an option's value; empty for a flag."""
    if param.is_flag or param.count:
        return ""
    if param.metavar:
        return param.metavar
    choices = param.type_descriptor.choices
    if choices:
        return "|".join(str(getattr(choice, "value", choice)) for choice in choices)
    kind = param.type_descriptor.annotation
    (inner,) = get_args(kind) or (kind,)
    return _PLACEHOLDERS.get(getattr(inner, "__name__", ""), "TEXT")


def shown_default(param: TyperOption) -> str:
    """Format an option's default; empty if there is none, or the help text already contains it."""
    if param.is_flag:
        return ("on" if param.default else "off") if param.secondary_opts else ""
    default = param.default.value if isinstance(param.default, Enum) else param.default
    if default is None or callable(default) or not param.show_default:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


class _Page:
    """Lines of help for stdout, with colours if it supports them."""

    def __init__(self, context: typer.Context) -> None:
        forced, shown = os.environ.get("FORCE_COLOR"), sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        context.color = bool(forced or shown) and not os.environ.get("NO_COLOR")
        self._coloured = context.color
        self._columns = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns - 1))
        self.lines: list[str] = []

    def paragraph(self, text: str, *, indent: int = 2, apart: bool = True) -> None:
        """Add a paragraph, after an empty line if it is ``apart``."""
        self.lines += [""] * apart
        self.lines += _wrapped(text, self._columns, " " * indent)

    def section(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Add a titled table of two columns; the second column is wrapped."""
        if not rows:
            return
        self.lines += ["", self._style(f"{title}:", bold=True)]
        width = min(max(len(name) for name, _ in rows), _LEFT, self._columns // 3)
        right = " " * (width + 4)
        for name, text in rows:
            wrapped, left = _wrapped(text, self._columns - len(right)), f"  {self._style(name, fg='cyan')}"
            if len(name) <= width and wrapped:
                left += f"{' ' * (width - len(name))}  {wrapped.pop(0)}"
            self.lines += [left, *(right + line for line in wrapped)]

    def options(self, options: Iterable[TyperOption]) -> None:
        """Add a section for each panel of options."""
        self.panels(((option, _names(option), _meaning(option)) for option in options), others=_OTHERS)

    def panels(self, rows: Iterable[tuple[Any, str, str]], *, others: str) -> None:
        """Add a section for each help panel of typer's objects, in order of first appearance, with names and texts."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for item, name, text in rows:
            panel = getattr(item, "rich_help_panel", None)
            panels.setdefault(panel if isinstance(panel, str) else others, []).append((name, text))
        for title, entries in panels.items():
            self.section(title, entries)

    def _style(self, text: str, **style: Any) -> str:
        return typer.style(text, **style) if self._coloured else text


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    whole = " ".join(text.split())
    return textwrap.wrap(
        whole,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _text(text: str | None) -> str:
    """Return a help text without markup escapes."""
    return (text or "").partition("\f")[0].replace("\\[", "[")


def _names(option: TyperOption) -> str:
    """Return the spellings of an option with its placeholder, the short spelling first."""
    spellings = [*sorted(option.opts, key=len), *option.secondary_opts]
    value = placeholder(option)
    return ", ".join(spellings) + (f" {value}" if value else "")


_STATED = re.compile(r"\[default[^]]*\]|\[default.*\]$")


def _meaning(option: TyperOption) -> str:
    text = _text(option.help)
    facts = []
    default = shown_default(option)
    if default and not _STATED.search(text):
        facts.append(f"default: {default}")
    low, high = getattr(option, "min", None), getattr(option, "max", None)
    if low is not None and high is not None:
        facts.append(f"{low} to {high}")
    elif low is not None:
        facts.append(f"at least {low}")
    if option.envvar:
        facts.append(f"environment: {option.envvar}")
    return " ".join([text, *(f"[{fact}]" for fact in facts)])


def _argument(argument: TyperArgument) -> str:
    """Format an argument for the usage line, in brackets if it is optional."""
    name = argument.metavar or str(argument.name).upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _options(params: Iterable[object]) -> list[TyperOption]:
    """Return the options that help shows, without the help option."""
    options = [param for param in params if isinstance(param, TyperOption) and not param.hidden]
    return [option for option in options if _ALL not in option.opts]


_EXAMPLE = "deepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json"
"""A typical training command."""


class HelpCommand(TyperCommand):
    """A command with a short help of the parameters ``first`` (empty: all) and a long one.

    With ``takes_launcher``, a training command with its launcher may follow the options.
    """

    first: frozenset[str] = frozenset()
    takes_launcher: bool = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and record which help is requested."""
        ctx.meta[_WANTS_ALL] = _ALL in (args[: args.index("--")] if "--" in args else args)
        return super().parse_args(ctx, at_home(args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        page, params = _Page(ctx), self.get_params(ctx)
        shown = [param for param in params if isinstance(param, TyperArgument) and not param.hidden]
        arguments, options = [(_argument(param), _text(param.help)) for param in shown], _options(params)
        usage, indent = "Usage:", 0
        if self.takes_launcher:
            form = f"Usage: {ctx.command_path} [OPTIONS] LAUNCHER [LAUNCHER_OPTIONS] SCRIPT ..."
            page.paragraph(form, indent=0, apart=False)
            usage, indent = "or:", 3
        names = " ".join(name for name, _ in arguments)
        page.paragraph(f"{usage} {ctx.command_path} [OPTIONS] {names}", indent=indent, apart=False)
        page.paragraph(_text(self.help))
        if self.takes_launcher:
            page.paragraph(f"Example: {ctx.command_path} {_EXAMPLE}")
        page.section("Arguments", arguments)
        if self.first and not ctx.meta.get(_WANTS_ALL):
            rows = [(_names(option), _meaning(option)) for option in options if option.name in self.first]
            page.section("Options that matter most", rows)
            page.paragraph(f"{len(options) - len(rows)} more options: {ctx.command_path} {_ALL}", indent=0)
        else:
            page.options(options)
        formatter.write("\n".join(page.lines) + "\n")


class HelpGroup(TyperGroup):
    """A group of commands whose help shows them in panels."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; show the help if there are no arguments."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), color=ctx.color)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        page = _Page(ctx)
        page.paragraph(f"Usage: {ctx.command_path} [OPTIONS] COMMAND [ARGS]...", indent=0, apart=False)
        page.paragraph(_text(self.help))
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        shown = [(command, name) for name, command in commands if command is not None and not command.hidden]
        page.panels(((item, name, _text(item.help).partition("\n\n")[0]) for item, name in shown), others=_COMMANDS)
        page.options(_options(self.get_params(ctx)))
        page.paragraph(f"{ctx.command_path} COMMAND --help shows a command's options.", indent=0)
        formatter.write("\n".join(page.lines) + "\n")
