"""Keeps a database password out of the process list, which every user of the machine can read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from optuna_dsat.tuning.options import STORAGE_ENV

__all__ = ["STORAGE_ENV", "hide_password", "without_password"]

_OPTION = "--storage"


def without_password(command: Sequence[str]) -> tuple[list[str], str | None]:
    """Return a command without a storage URL that holds a password, and that URL; None if no URL holds one.

    Arguments after ``--`` are the script's and stay.
    """
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
    try:
        parts = urlsplit(url)
    except ValueError:
        return "@" in url
    return parts.password is not None or "pass" in parts.query.lower()


def hide_password() -> None:
    """Start this command again, in this process, with its storage URL in the environment instead of the arguments.

    The environment of a process is readable only by its user. Returns if the URL holds no password.
    """
    command, secret = without_password(sys.orig_argv)
    if secret is not None:
        os.execve(sys.executable, command, {**os.environ, STORAGE_ENV: secret})
