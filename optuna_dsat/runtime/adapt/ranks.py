"""Sets the script's ``--local_rank`` option, which the ``deepspeed`` launcher passes.

Scripts for the ``deepspeed`` launcher, which passes ``--local_rank=N`` to every rank, often have a default that is
valid for a single rank only. torchrun sets the environment variable ``LOCAL_RANK`` instead; DeepSpeed raises an error
if the two differ. Therefore the option's default is set to this rank's number, in the parsers of argparse, click,
Typer and Python Fire; an explicit argument takes precedence. For scripts that search ``sys.argv``, the option is added
there.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.imports import ImportWatch
from optuna_dsat.runtime.user_code import parsed_source

__all__ = ["default_local_rank", "with_local_rank"]

_NAME = "local_rank"
_OPTIONS = frozenset({"--local_rank", "--local-rank"})
_BY_HAND = re.compile(r"--local_rank(?![\w-])")
_DECLARING = frozenset({"add_argument", "Argument", "Option", "option"})
"""Functions that declare options of parsers."""


def default_local_rank(local_rank: int, *, on_found: Callable[[], None] = lambda: None) -> None:
    """Make ``local_rank`` the default of the option in every parser of this process.

    Args:
        local_rank: Number of this rank on its host, from 0.
        on_found: Called whenever a parser has the option.
    """
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        _default_in(self, local_rank, on_found)
        return original(self, *args, **kwargs)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    ImportWatch(
        {name: functools.partial(imported, local_rank, on_found) for name, imported in _WATCHED.items()}
    ).install()


def with_local_rank(args: Sequence[str], local_rank: int, *, script: Path | None) -> tuple[str, ...]:
    """Return a script's arguments, with the option prepended if the script searches ``sys.argv`` for it.

    Args:
        args: The arguments.
        local_rank: Number of this rank on its host, from 0.
        script: The script's file; None if unknown.
    """
    given = any(word.partition("=")[0] in _OPTIONS for word in args)
    if given or script is None or not _reads_by_hand(script):
        return tuple(args)
    return (f"--local_rank={local_rank}", *args)


def _reads_by_hand(script: Path) -> bool:
    """Return whether a file uses ``sys.argv`` and contains the option's name outside of parser declarations."""
    try:
        nodes = list(ast.walk(parsed_source(script)))
    except (OSError, SyntaxError):
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    declared = {
        id(word)
        for call in calls
        if (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")) in _DECLARING
        for word in call.args
    }
    named = any(
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _BY_HAND.match(node.value) is not None
        and id(node) not in declared
        for node in nodes
    )
    return named and any(isinstance(node, ast.Attribute) and node.attr == "argv" for node in nodes)


def _default_in(parser: argparse.ArgumentParser, local_rank: int, on_found: Callable[[], None]) -> None:
    for action in parser._actions:
        if _OPTIONS.intersection(action.option_strings):
            action.default = local_rank
            on_found()


def _fire_imported(local_rank: int, on_found: Callable[[], None], core: ModuleType) -> None:
    """Pass ``local_rank`` to functions with such a parameter that Python Fire calls."""
    original = core._ParseKeywordArgs

    @functools.wraps(original)
    def parse_keywords(args: Any, spec: Any) -> Any:
        keywords, *left = original(args, spec)
        if _NAME in (*spec.args, *spec.kwonlyargs):
            keywords.setdefault(_NAME, str(local_rank))
            on_found()
        return (keywords, *left)

    core._ParseKeywordArgs = parse_keywords  # type: ignore[attr-defined]


def _click_imported(local_rank: int, on_found: Callable[[], None], click: ModuleType) -> None:
    original = click.Command.parse_args

    @functools.wraps(original)
    def parse_args(self: Any, ctx: Any, args: list[str]) -> Any:
        for parameter in self.params:
            if _OPTIONS.intersection(parameter.opts):
                parameter.default, parameter.required = local_rank, False
                on_found()
        return original(self, ctx, args)

    click.Command.parse_args = parse_args


_WATCHED: dict[str, Callable[[int, Callable[[], None], ModuleType], None]] = {
    "click.core": _click_imported,
    "fire.core": _fire_imported,
    "typer._click.core": _click_imported,  # a copy, included in newer versions of Typer
}
"""Module with a library's parser -> function to call when it has been imported."""
