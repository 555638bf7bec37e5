"""Default of the script's option for its DeepSpeed config: the launch's own file.

A script that takes its config from an option of its command line, such as those of
``deepspeed.add_config_arguments``, may be tuned by naming the config to the tuner alone. Then the option gets the file
as its default; an explicit argument takes precedence. Where the option has a DeepSpeed config of the script's as its
default, or is given the name of one that lies elsewhere (``--deepspeed zero2``), that stays, and the option is known
to those who print the command that trains.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.overlay import read_config

__all__ = ["default_config_option"]

_CONFIG = re.compile(r"--(deepspeed|deepscale|ds)([-_]?(config|cfg))([-_]?(file|path|json))?$", re.IGNORECASE)
"""Options that name a DeepSpeed config."""
_SWITCH = "--deepspeed"
"""DeepSpeed's switch, or the Hugging Face Trainer's option for the config."""
_SECTIONS = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "optimizer"})
"""Keys of which a DeepSpeed config has one at least."""


def default_config_option(config_path: str, *, user_config: str = "", on_found: Callable[[str], None]) -> None:
    """Make ``config_path`` the default of a parser's option for the DeepSpeed config, in every parser of this process.

    A default is replaced if it is empty, names no file or the user's config. DeepSpeed's switch is on by default then.

    Args:
        config_path: The launch's DeepSpeed config; empty if no default is to be replaced.
        user_config: The user's, of which it is the launch's; empty for none.
        on_found: Called with the name of an option whose default was replaced or is a DeepSpeed config, or of the
            Trainer's where what it is given is no file.
    """
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        found = _config_action(self)
        if found is not None and config_path and _is_open(found, user_config):
            found.default, found.required = config_path, False
            on_found(found.option_strings[0])
            for action in self._actions:
                if _SWITCH in action.option_strings and action.nargs == 0:
                    action.default = True
        elif found is not None and (_is_config(found.default) or _is_given_a_name(found, args, kwargs)):
            on_found(found.option_strings[0])
        return original(self, *args, **kwargs)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _config_action(parser: argparse.ArgumentParser) -> argparse.Action | None:
    """Return a parser's option for the DeepSpeed config; None if it has none."""
    valued = [action for action in parser._actions if action.option_strings and action.nargs != 0]
    named = [action for action in valued if any(_CONFIG.match(option) for option in action.option_strings)]
    of_trainer = [action for action in valued if _SWITCH in action.option_strings]
    return next(iter((*named, *of_trainer)), None)


def _is_open(action: argparse.Action, user_config: str) -> bool:
    default = action.default
    if default in (None, "", argparse.SUPPRESS):
        return True
    if not isinstance(default, str):
        return False
    return not Path(default).is_file() or (bool(user_config) and Path(default).samefile(user_config))


def _is_given_a_name(action: argparse.Action, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the Trainer's option is among the arguments of ``parse_known_args``, and what stands there is no file."""
    if _SWITCH not in action.option_strings:
        return False
    given = args[0] if args else kwargs.get("args")
    words = [str(word) for word in (sys.argv[1:] if given is None else given)]
    values = [word.partition("=")[2] for word in words if word.startswith(f"{_SWITCH}=")]
    values += [value for word, value in itertools.pairwise(words) if word == _SWITCH and not value.startswith("-")]
    return bool(values) and not Path(values[-1]).exists()


def _is_config(default: object) -> bool:
    """Whether an option's default names a file with a DeepSpeed config."""
    if not isinstance(default, str) or not Path(default).is_file():
        return False
    try:
        return not _SECTIONS.isdisjoint(read_config(default))
    except ValueError:
        return False
