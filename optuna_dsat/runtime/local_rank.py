"""Default of the script's ``--local_rank`` option, as the ``deepspeed`` launcher passes it.

That launcher passes ``--local_rank=N`` to every rank, and scripts written for it declare the option, often with a
default that is valid for a single rank only. torchrun sets the environment variable ``LOCAL_RANK`` instead; DeepSpeed
raises an error if the two differ. Therefore the option's default is set to this rank's number, in the parsers of
argparse, click and Typer; an explicit argument takes precedence.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.import_watch import ImportWatch

__all__ = ["default_local_rank"]

_OPTIONS = frozenset({"--local_rank", "--local-rank"})
_CLICK = ("click.core", "typer._click.core")
"""click's module of commands, and the copy of it that newer versions of Typer bring along."""


def default_local_rank(local_rank: int, *, on_found: Callable[[], None] = lambda: None) -> None:
    """Make ``local_rank`` the default of the option in every parser of this process.

    Args:
        local_rank: Number of this rank on its host, from 0.
        on_found: Called whenever a parser has the option.
    """
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        for action in self._actions:
            if _OPTIONS.intersection(action.option_strings):
                action.default = local_rank
                on_found()
        return original(self, *args, **kwargs)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    imported = functools.partial(_click_imported, local_rank, on_found)
    ImportWatch(dict.fromkeys(_CLICK, imported)).install()


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
