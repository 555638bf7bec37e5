"""Rewriting of arguments before they are parsed.

Secrets are kept out of them, as every user of the machine can read the process list.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from optuna_dsat.secrecy.names import is_secret_name
from optuna_dsat.secrecy.references import References, refer_in_command
from optuna_dsat.study.options.declaration import STORAGE_ENV

COUNTS = ("--zero-stages", "--gpus-per-trial", "--cpu-ranks")
"""Options that accept several numbers."""


def spread_numbers(argv: list[str], *options: str) -> list[str]:
    """Rewrite ``option 1 2 3`` before ``--`` as ``option 1,2,3``, because an option takes a single value."""
    result: list[str] = []
    index = 0
    while index < len(argv) and argv[index] != "--":
        result.append(argv[index])
        index += 1
        if result[-1] in options:
            end = index
            while end < len(argv) and argv[end].replace(",", "").isdigit():
                end += 1
            if end > index + 1:
                result.append(",".join(argv[index:end]))
                index = end
    return [*result, *argv[index:]]


def lift_option(argv: list[str], option: str) -> list[str]:
    """Move ``option VALUE`` before ``--`` to the front of ``argv``, where options of all commands are parsed."""
    end = argv.index("--") if "--" in argv else len(argv)
    front: list[str] = []
    rest: list[str] = []
    index = 0
    while index < end:
        if argv[index] == option:
            front += argv[index : min(index + 2, end)]
            index += 2
        else:
            (front if argv[index].startswith(f"{option}=") else rest).append(argv[index])
            index += 1
    return [*front, *rest, *argv[end:]]


_AT_HOME = re.compile(r"(--[\w-]+=)(~.*)", re.DOTALL)


def at_home(words: Sequence[str]) -> list[str]:
    """Expand ``~`` in ``--option=~/path`` before ``--``, as a shell does in ``--option ~/path`` alone."""
    end = words.index("--") if "--" in words else len(words)
    matches = [_AT_HOME.fullmatch(word) for word in words[:end]]
    expanded = [match and match[1] + os.path.expanduser(match[2]) for match in matches]  # noqa: PTH111 - or no path
    return [*(new or word for new, word in zip(expanded, words, strict=False)), *words[end:]]


_OPTION = "--storage"
_PASSWORD = re.compile(r"[\w+]+://[^:/]*:[^@]*@")
"""Matches user and password as SQLAlchemy does: the password may contain ``/``, ``#`` and ``?``."""
_QUERY_NAME = re.compile(r"[?&]([^=&#]+)=")
_ONCE_ENV = "OPTUNA_DSAT_SECRETS_HIDDEN"
"""Set while the command re-executes itself."""


def without_password(command: Sequence[str]) -> tuple[list[str], str | None]:
    """Return a command without storage URLs that have a password before ``--``, and such a URL; None without."""
    kept: list[str] = []
    secret: str | None = None
    words = iter(command)
    for word in words:
        if word == "--":
            return [*kept, word, *words], secret
        name, equals, value = word.partition("=")
        if name == _OPTION:
            given = [word] if equals else [word, *(following for following in [next(words, None)] if following)]
            url = value if equals else given[-1]
            if _has_password(url):
                secret = url
                continue
            kept += given
        else:
            kept.append(word)
    return kept, secret


def _has_password(url: str) -> bool:
    names = _QUERY_NAME.findall(url)
    return bool(_PASSWORD.match(url)) or any("pass" in name.lower() or is_secret_name(name) for name in names)


def without_secrets_of(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command without its secrets, and variables that contain them: references, and the storage URL."""
    kept, url = without_password(command)
    references = References(list(command))
    kept = list(refer_in_command(kept, references))
    return kept, {**references.values, **({} if url is None else {STORAGE_ENV: url})}


def hide_secrets() -> None:
    """Re-execute a command that has secrets with these in its environment, which only its user can read."""
    if os.environ.pop(_ONCE_ENV, None) is not None:
        return
    command, secrets = without_secrets_of(sys.orig_argv)
    if secrets:
        os.execve(sys.executable, command, {**os.environ, **secrets, _ONCE_ENV: "1"})
