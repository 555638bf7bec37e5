"""Words of a shell's command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from optuna_dsat.escape.terminal import plain

__all__ = ["folded", "shell_line"]

_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)
_GOES_ON = " \\\n  "


def shell_line(words: Iterable[str]) -> str:
    """Return words as a command line of one line: what has control characters is quoted as ``$'...'`` has it."""
    return " ".join(map(_quoted, words))


def folded(line: str, *, width: int) -> str:
    """Return a command line as lines that a shell reads as that one; a word longer than the width has its own.

    Args:
        line: The command line.
        width: Most characters of a line.
    """
    words = _WORD.findall(line)
    if " ".join(words) != line:  # no such line as is made here
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
