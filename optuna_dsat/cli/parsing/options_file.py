"""Option files: the ``[tool.optuna-dsat]`` table of ``pyproject.toml``, or a TOML file named by ``--options``.

Keys are the long names of options. A top-level key applies to every command whose option takes its value, except the
limits of ``resume``; a table named after a command applies to that command only::

    [tool.optuna-dsat]
    storage = "postgresql://me@db/studies"
    zero-stages = [2, 3]

    [tool.optuna-dsat.asha]
    divisor = 3

A ``pyproject.toml`` that another user can write is ignored: options such as ``env`` run code.
"""

from __future__ import annotations

import difflib
import json
import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.exceptions import TyperException

from optuna_dsat.config.documents import checked, read_document
from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.failure import rule_in_words

OPTIONS_ENV = "OPTUNA_DSAT_OPTIONS"
"""Environment variable with the path of an options file."""
FILE, OF_COMMAND = "file", "of_command"
"""Keys of the root context's object: path of the options file read, spellings of options set by a training command."""
_TABLE = "optuna-dsat"
_NOT_SHARED = {
    "resume": frozenset({"max_trials", "min_gain", "confirm_time", "wait_for_gpus", "python"}),
    "worker": frozenset({"python"}),
    "train": frozenset({"python"}),
}
"""Command -> options that a top-level key does not set: ``resume`` keeps the study's own limits."""


@dataclass(frozen=True, kw_only=True)
class OptionsFile:
    """The unchecked options of one file."""

    path: Path
    table: Mapping[str, Any]

    def default_map(self, root: TyperGroup, context: typer.Context) -> dict[str, Any]:
        """Return the checked values as a ``default_map``, nested as commands are; ``UsageError`` names file and key."""
        tables = {key: value for key, value in self.table.items() if key in root.commands and isinstance(value, dict)}
        every = {key: value for key, value in self.table.items() if key not in tables}
        commands: dict[str, dict[str, Any]] = {
            name: dict(command.commands) if isinstance(command, TyperGroup) else {name: command}
            for name, command in root.commands.items()
        }
        flat = [command for inner in commands.values() for command in inner.values()]
        for name in every:
            if not any(_find(command, name) for command in flat):
                raise self._unknown(name, flat)
        defaults: dict[str, Any] = {}
        taken: set[str] = set()
        refused: dict[str, UsageError] = {}
        for command_name, inner in commands.items():
            mine = tables.get(command_name, {})
            for name in mine:
                if not any(_find(command, name) for command in inner.values()):
                    raise self._unknown(name, inner.values(), where=command_name)
            here: dict[str, dict[str, Any]] = {part: {} for part in inner}
            for part, command in inner.items():
                for name, value in {**every, **mine}.items():
                    option = _find(command, name)
                    kept = () if name in mine else _NOT_SHARED.get(command_name, ())
                    if value is None or option is None or option.name in kept:
                        continue
                    try:
                        here[part][str(option.name)] = self._checked(name, value, option, context)
                        taken.add(name)
                    except UsageError as error:
                        if name in mine:
                            raise
                        refused.setdefault(name, error)  # plan takes one number of ranks, a search several
            defaults[command_name] = here.get(command_name, here)
        for name in [name for name in refused if name not in taken]:
            raise refused[name]
        return defaults

    def value_of(self, command: str, name: str) -> Any:
        """Return the unchecked value of a command's option; None if it is not set."""
        section = self.table.get(command)
        for table in (section if isinstance(section, dict) else {}, self.table):
            for key in (name, name.replace("-", "_")):
                if key in table:
                    return table[key]
        return None

    def _unknown(self, name: str, commands: Any, *, where: str = "") -> UsageError:
        options = (option for command in commands for option in _options(command))
        known = sorted({max((name.lstrip("-") for name in option.opts), key=len) for option in options})
        near = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        what = f"no option of `optuna-dsat {where}`" if where else "no option of any command"
        return UsageError(f"{self.path}: {name!r} is {what}.{hint}")

    def _checked(self, name: str, value: Any, option: TyperOption, context: typer.Context) -> Any:
        """Convert a value to the form that the option's parser takes."""
        if isinstance(value, dict) and option.multiple:
            value = [f"{key}={item if isinstance(item, str) else _as_json(item)}" for key, item in value.items()]
        elif option.multiple:
            value = [str(item) for item in (value if isinstance(value, list) else [value])]
        elif isinstance(value, str) and value.startswith("~"):
            value = os.path.expanduser(value)  # noqa: PTH111 - also text that is no path
        if option.is_flag is not isinstance(value, bool) or isinstance(value, dict):
            kind = "true or false" if option.is_flag else "a value such as on the command line"
            raise UsageError(f"{self.path}: {name} is {_as_json(value)}; it must be {kind}.")
        try:
            option.process_value(context, value)
        except TyperException as error:
            message = rule_in_words(error.message.rstrip("."))
            raise UsageError(f"{self.path}: {name} is {_as_json(value)}: {message}.") from None
        return value


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str)


def file_of(
    options: Path | None, *, cwd: Path, on_ignored: Callable[[str], None] = lambda _: None
) -> OptionsFile | None:
    """Return the file given by ``--options`` (``read_options``), else of a folder (``find_options``); None without."""
    return find_options(cwd, on_ignored=on_ignored) if options is None else read_options(options)


def find_options(folder: Path, *, on_ignored: Callable[[str], None] = lambda _: None) -> OptionsFile | None:
    """Return the ``[tool.optuna-dsat]`` table of the nearest ``pyproject.toml`` with that table; None without any.

    ``on_ignored`` is called with a message for each file that is ignored because another user can write it.

    Raises:
        UsageError: If a ``pyproject.toml`` that mentions the table is not TOML, or the table is not a table.
    """
    for parent in (folder, *folder.parents):
        path = parent / "pyproject.toml"
        try:
            text = read_document(path).decode()
        except (OSError, UnicodeDecodeError, UsageError):
            continue  # absent, unreadable or not UTF-8, which TOML requires: not a file with our table
        if _TABLE not in text:
            continue
        reason = others_write(path)
        try:
            table = _own_table(_parse_toml(path, text))
        except UsageError:
            if reason is None:
                raise
            continue
        if table is not None and reason is None:
            return _options_file(path, table)
        if table is not None:
            on_ignored(f"{path} is ignored: {reason}. To use it, name it by --options.")
    return None


def others_write(path: Path) -> str | None:
    """Return why a user other than this one and root can change a file; None if no other user can.

    The file, every link on the way to it and every parent folder must belong to this user, to root, or to the user who
    called ``sudo``, and must not be writable by everyone. In a folder with the sticky bit, such as ``/tmp``, only
    owners can replace their files.
    """
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0 and (caller := os.environ.get("SUDO_UID", "")).isdecimal():
        trusted.add(int(caller))
    real = path.resolve()
    for part in dict.fromkeys((path, *path.parents, real, *real.parents)):
        state = part.lstat()
        name = "it" if part == path else str(part)
        if state.st_uid not in trusted:
            return f"{name} belongs to another user (uid {state.st_uid})"
        sticky_folder = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
        if state.st_mode & stat.S_IWOTH and not sticky_folder and not stat.S_ISLNK(state.st_mode):
            return f"{name} can be written by every user"
    return None


def read_options(path: Path) -> OptionsFile:
    """Return a TOML file's options: all, or its ``[tool.optuna-dsat]`` table; ``UsageError`` if there is none."""
    try:
        text = read_document(path.expanduser()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--options {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    table = _parse_toml(path, text)
    return _options_file(path, (_own_table(table) or {}) if "tool" in table else table)


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return dict(checked(tomllib.loads(text), str(path)))
    except (ValueError, RecursionError) as error:
        first, _, _ = str(error).partition("\n")
        raise UsageError(f"{path} is not TOML: {first[:200]}.") from None


def _own_table(document: Mapping[str, Any]) -> Any:
    tools = document.get("tool")
    return tools.get(_TABLE) if isinstance(tools, dict) else None


def _options_file(path: Path, table: Any) -> OptionsFile:
    if not isinstance(table, dict):
        raise UsageError(f"{path} contains no table of options, such as `max-trials = 30`.")
    return OptionsFile(path=path, table=table)


def _options(command: TyperCommand) -> list[TyperOption]:
    return [param for param in command.params if isinstance(param, TyperOption)]


def _find(command: TyperCommand, name: str) -> TyperOption | None:
    wanted = "--" + name.replace("_", "-")
    return next((option for option in _options(command) if wanted in option.opts), None)
