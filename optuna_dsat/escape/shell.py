"""Words of a shell's command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from optuna_dsat.escape.terminal import plain

__all__ = ["shell_line"]


def shell_line(words: Iterable[str]) -> str:
    """Return words as a command line of one line: what has control characters is quoted as ``$'...'`` has it."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if plain(word) == word and "\n" not in word and "\t" not in word:
        return shlex.quote(word)
    shown = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f"$'{plain(shown)}'"
