"""Sets the launch's file as default of the script's option for its DeepSpeed config.

Scripts with a command-line option for the config, such as the options of ``deepspeed.add_config_arguments``, can be
tuned by passing the config to the tuner only. The option's default is then the launch's file; an explicit argument
takes precedence. A default that is a DeepSpeed config of the script, or an argument with the name of a config stored
elsewhere (``--deepspeed zero2``), is kept, and the option is reported for the final training command.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.imports import patch, replace_function
from optuna_dsat.runtime.overlay import read_config

_CONFIG = re.compile(r"--(deepspeed|deepscale|ds)([-_]?(config|cfg))([-_]?(file|path|json))?$", re.IGNORECASE)
"""Options for the path of a DeepSpeed config."""
_SWITCH = "--deepspeed"
"""DeepSpeed's switch, or the Hugging Face Trainer's option for the config."""
_SECTIONS = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "optimizer"})
"""Keys of which a DeepSpeed config has at least one."""


def default_config_option(config_path: str, *, user_config: str = "", on_found: Callable[[str], None]) -> None:
    """Make ``config_path`` the default of a parser's option for the DeepSpeed config, in every parser of this process.

    A default is replaced if it is empty, not a file, or the user's config; DeepSpeed's switch is then on by default. An
    empty ``config_path`` replaces none. ``on_found`` gets the name of an option whose default was replaced or is a
    DeepSpeed config, and of the Trainer's option if its argument is not a file.
    """

    @patch(argparse.ArgumentParser, "parse_known_args")
    def parse_known_args(original: Any, self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        result = _config_action(self)
        if result is not None and config_path and _is_open(result, user_config):
            result.default, result.required = config_path, False
            on_found(result.option_strings[0])
            for action in self._actions:
                if _SWITCH in action.option_strings and action.nargs == 0:
                    action.default = True
        elif result is not None and (_is_config(result.default) or _is_given_a_name(result, args, kwargs)):
            on_found(result.option_strings[0])
        return original(self, *args, **kwargs)


def _config_action(parser: argparse.ArgumentParser) -> argparse.Action | None:
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
    return not Path(default).is_file() or is_same_file(default, user_config)


def _is_given_a_name(action: argparse.Action, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``action`` is the Trainer's option and is given with a value that is not an existing path."""
    if _SWITCH not in action.option_strings:
        return False
    given = args[0] if args else kwargs.get("args")
    words = [str(word) for word in (sys.argv[1:] if given is None else given)]
    values = [word.partition("=")[2] for word in words if word.startswith(f"{_SWITCH}=")]
    following = zip(words, words[1:])
    values += [value for word, value in following if word == _SWITCH and not value.startswith("-")]
    return bool(values) and not Path(values[-1]).exists()


def _is_config(default: object) -> bool:
    if not isinstance(default, str) or not Path(default).is_file():
        return False
    try:
        return not _SECTIONS.isdisjoint(read_config(default))
    except ValueError:
        return False


@dataclass(frozen=True)
class ScriptCommand:
    """The user's script or module with its arguments."""

    name: str
    """Path of a Python file, or a module's name."""
    is_module: bool
    args: tuple[str, ...]

    def run(self, *, safe_path: bool) -> None:
        """Run it as ``__main__``, with ``sys.argv`` and ``sys.path[0]`` as Python itself would set them."""
        sys.argv = [self.name, *self.args]
        sys.orig_argv = [sys.executable, *(["-m"] if self.is_module else []), *sys.argv]
        if not safe_path:
            # ``python -m`` sets it to the working directory, ``python SCRIPT`` to the script's real directory.
            sys.path.insert(0, str(Path.cwd() if self.is_module else Path(self.name).resolve().parent))
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        runpy.run_path(self.name, run_name="__main__")


def parse_command(argv: Sequence[str]) -> ScriptCommand:
    """Parse ``SCRIPT ARGS...`` or ``--module PKG.MOD ARGS...``.

    Raises:
        ValueError: If neither a script nor a module is given.
    """
    if argv and argv[0] == "--module" and len(argv) > 1:
        return ScriptCommand(name=argv[1], is_module=True, args=tuple(argv[2:]))
    if not argv or argv[0].startswith("-"):
        raise ValueError(
            f"python -m optuna_dsat.runtime takes SCRIPT ARGS... or --module PKG.MOD ARGS...; got {list(argv)}."
        )
    return ScriptCommand(name=argv[0], is_module=False, args=tuple(argv[1:]))


def replace_config_paths(args: Sequence[str], *, user_config: str, config: str) -> tuple[str, ...]:
    """Return the arguments with paths of the user's config file replaced by the trial's config file.

    An argument, or the value in ``--flag=path``, matches if it is the same text or refers to the same file.
    """
    result = []
    for arg in args:
        flag, equals, value = arg.partition("=")
        if is_same_file(arg, user_config):
            result.append(config)
        else:
            result.append(f"{flag}={config}" if equals and is_same_file(value, user_config) else arg)
    return tuple(result)


def with_option(args: Sequence[str], option: str, value: str) -> list[str]:
    """Return arguments with the value of an option (``--a_b`` or ``--a-b``) replaced, or appended if it is missing.

    An option that ends with ``=`` is a Hydra override. A missing option is written as others are: some scripts that
    parse their arguments themselves read ``--name=value`` only.
    """
    if option.endswith("="):
        kept = [arg for arg in args if not arg.startswith((option, f"+{option}", f"++{option}"))]
        return [*kept, f"{option}{value}"]
    result, is_present = list(args), False
    for index, arg in enumerate(args):
        name, equals, _ = arg.partition("=")
        if name.replace("_", "-") == option.replace("_", "-") and (equals or index + 1 < len(args)):
            is_present = True
            result[index if equals else index + 1] = f"{name}={value}" if equals else value
    names = [arg for arg in args if arg.startswith("--")]
    added = [f"{option}={value}"] if names and all("=" in name for name in names) else [option, value]
    return result if is_present else [*result, *added]


def is_same_file(candidate: str, path: str) -> bool:
    """Return whether a text is a path of a file. The file may be gone, like the config of a stored study."""
    if not candidate or not path:
        return False
    if candidate == path:
        return True
    try:
        return Path(candidate).samefile(path)
    except FileNotFoundError:
        return os.path.realpath(candidate) == os.path.realpath(path)
    except (OSError, ValueError):  # not a path
        return False


# Redirects reads of the user's DeepSpeed config file to the launch's.
#
# Many scripts open a config whose path is hard-coded or the default of an option, and take their batch size from it.
# Replacing arguments does not affect such scripts; therefore opening the user's config for reading opens the launch's
# instead.

_WRITING = frozenset("wax+")
_MOST_CHARS = 2**16
"""Maximum size of a copy of the config; larger files are data."""
_MOST_FILES = 1000
"""Maximum number of files compared with the config: data may be many files."""


@contextmanager
def reads_redirected(
    *, user_config: str, config: str, on_read: Callable[[bool], None] = lambda _: None
) -> Iterator[None]:
    """Return a context in which opening the user's config for reading opens ``config``, that of the launch.

    So does opening a copy, as in the folder of an earlier run, with which some scripts compare their config. The config
    of another launch of the study is not a copy. Covers ``open``, ``io.open`` and ``pathlib``. Whenever either file is
    opened for reading, ``on_read`` is called: with True if by the launch's path, which scripts get as an argument, and
    with False if by the user's path.
    """
    if not user_config:
        yield
        return
    real = io.open
    name, own_name, launches = Path(user_config).name, Path(config).name, Path(config).parent.parent
    content, suffix, checks = _content(user_config, real), Path(name).suffix, iter(range(_MOST_FILES))

    def is_copy(path: str | os.PathLike[str]) -> bool:
        text = os.fspath(path)
        is_like = content and suffix and isinstance(text, str) and text.endswith(suffix)
        if is_like and Path(text).name == own_name and Path(text).parent.parent == launches:
            return False
        return bool(
            is_like and next(checks, None) is not None and Path(text).is_file() and _content(text, real) == content
        )

    def redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and not _WRITING & set(mode):
            if _names(file, name, user_config):
                file = config
                kwargs.pop("opener", None)  # of pathlib in Python 3.9, which opens its own path
                on_read(False)
            elif _names(file, own_name, config):
                on_read(True)
            elif is_copy(file):
                file = config
                kwargs.pop("opener", None)
        return real(file, mode, *args, **kwargs)

    replace_function(io, "open", redirected)
    try:
        yield
    finally:
        replace_function(io, "open", real)


def _content(path: str, read: Callable[..., Any]) -> Any:
    """Return the value in a JSON file, the beginning of another text; None if it cannot be read."""
    try:
        with read(path, encoding="utf-8") as opened:
            text = opened.read(_MOST_CHARS)
    except (OSError, ValueError):
        return None
    try:
        return json.JSONDecoder().decode(text)  # json.loads is watched
    except ValueError:
        return text


def _names(file: str | os.PathLike[str], name: str, user_config: str) -> bool:
    path = os.fspath(file)
    return isinstance(path, str) and path.endswith(name) and is_same_file(path, user_config)
