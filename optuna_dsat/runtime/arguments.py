"""The script's command line: which script or module runs, and which arguments name the config file."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ScriptCommand", "is_same_file", "parse_command", "replace_config_paths"]


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """The user's script or module with its arguments."""

    name: str
    """Path of a Python file, or a module's name."""
    is_module: bool
    args: tuple[str, ...]

    def run(self, *, safe_path: bool) -> None:
        """Run it as ``__main__``, with ``sys.argv`` and ``sys.path[0]`` as Python itself would set them.

        Args:
            safe_path: Whether the script's folder stays out of ``sys.path`` (``python -P``).
        """
        sys.argv = [self.name, *self.args]
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        if not safe_path:
            # ``python -m`` sets it to the working directory, ``python SCRIPT`` to the script's real directory.
            sys.path[0] = str(Path(self.name).resolve().parent)
        runpy.run_path(self.name, run_name="__main__")


def parse_command(argv: Sequence[str]) -> ScriptCommand:
    """Parse ``SCRIPT ARGS...`` or ``--module PKG.MOD ARGS...``.

    Raises:
        ValueError: If neither a script nor a module is named.
    """
    if argv and argv[0] == "--module" and len(argv) > 1:
        return ScriptCommand(name=argv[1], is_module=True, args=tuple(argv[2:]))
    if not argv or argv[0].startswith("-"):
        raise ValueError(
            f"python -m optuna_dsat.runtime takes SCRIPT ARGS... or --module PKG.MOD ARGS...; got {list(argv)}."
        )
    return ScriptCommand(name=argv[0], is_module=False, args=tuple(argv[1:]))


def replace_config_paths(args: Sequence[str], *, user_config: str, config: str) -> tuple[str, ...]:
    """Return the arguments, with paths of the user's config file replaced by the trial's config file.

    An argument matches if it is the same text or refers to the same file, alone or as the value of
    ``--flag=path``.
    """
    return tuple(_replaced(arg, user_config, config) for arg in args)


def _replaced(arg: str, user_config: str, config: str) -> str:
    if is_same_file(arg, user_config):
        return config
    flag, equals, value = arg.partition("=")
    if equals and is_same_file(value, user_config):
        return f"{flag}={config}"
    return arg


def is_same_file(candidate: str, path: str) -> bool:
    """Return whether a text is a file's path; also of a file that is gone, such as the config of a stored study."""
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
