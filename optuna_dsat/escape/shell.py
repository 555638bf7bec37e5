"""Build shell command lines."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from optuna_dsat.escape.terminal import plain

_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)
_GOES_ON = " \\\n  "
_left: list[Path] = []
"""Folders that this process has left; the first is the working directory of the parent shell."""


def enter(folder: Path) -> None:
    """Change the working directory of this process; the parent shell keeps its directory."""
    _left.append(Path.cwd())
    os.chdir(folder)


def in_folder(folder: str) -> list[str]:
    """Return the options of ``env`` to run a command in a folder; empty if it is the shell's directory."""
    here = _left[0] if _left else Path.cwd()
    return [] if here.resolve() == Path(folder).resolve() else ["-C", folder]


def program(name: str, python: str | None = None) -> str:
    """Return the name of a program of a Python environment, by default this one; its path if ``PATH`` has another."""
    installed, result = Path(python or sys.executable).with_name(name), shutil.which(name)
    is_found = result is not None and Path(result).parent.resolve() == installed.parent.resolve()
    return name if is_found or not installed.exists() else str(installed)


def shell_line(words: Iterable[str]) -> str:
    """Return words as a single-line command; words with control characters are quoted as ``$'...'``."""
    return " ".join(map(_quoted, words))


def install_command(requirement: str) -> str:
    """Return the command that installs a requirement into the environment of this process, which may be a tool's."""
    parts = Path(sys.prefix).parts
    if "pipx" in parts:
        return shell_line(["pipx", "runpip", Path(sys.prefix).name, "install", requirement])
    if "uv" in parts and "tools" in parts:  # has no pip
        return shell_line(["uv", "pip", "install", "--python", sys.executable, requirement])
    return shell_line(["pip", "install", requirement])


def folded(line: str, *, width: int) -> str:
    """Fold a command line into equivalent lines; a word longer than the width gets a separate line."""
    words = _WORD.findall(line)
    if " ".join(words) != line:  # not created by this module
        return line
    lines = words[:1]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > width - len(_GOES_ON):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return _GOES_ON.join(lines)


def _quoted(word: str) -> str:
    if plain(word) == word and "\n" not in word and "\t" not in word:
        return shlex.quote(word)
    shown = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f"$'{plain(shown)}'"
