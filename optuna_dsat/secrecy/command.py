"""Find secrets in a command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from itertools import zip_longest

from optuna_dsat.secrecy.names import is_secret, is_secret_name
from optuna_dsat.secrecy.references import References, shell_join
from optuna_dsat.secrecy.shapes import HIDDEN, replaced

_ASSIGNMENT = re.compile(r"(?P<head>[-+~]{0,2}(?P<name>[A-Za-z][\w./@-]*)=)(?P<value>.*)", re.DOTALL)
"""``--token=x``, Hydra's ``+hub.token=x``, ``NAME=x``."""
_OPTION = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)")
_KEY = re.compile(r"[A-Za-z]\w*(?:\.\w+)+")
"""``hub.token`` of ``--opts hub.token X``."""
_LIKE_AN_OPTION = re.compile(
    r"--[A-Za-z]+(?:[-_.][A-Za-z0-9]+)*(?:=.*)?|--[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*(?:=.*)?", re.DOTALL
)
_SHORT_OPTION_CHARS = 2


def without_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command with its secrets, detected by name and by shape, replaced by ``***``.

    ``--hf-token X``, ``--api_key=X``, ``wandb.key=X``, ``https://host/?token=X``, passwords in URLs, ``sk-...``.
    """

    def in_text(text: str, _name: str) -> str:
        return replaced(text, lambda _: HIDDEN)

    return _replaced(command, by_name=lambda _name, _value: HIDDEN, in_text=in_text)


def hidden_command(command: str) -> str:
    """Return a shell command with its secrets replaced by ``***``."""
    return shell_join(without_secrets(shlex.split(command)))


def refer_in_command(command: Sequence[str], references: References) -> tuple[str, ...]:
    """Return the command with its secrets, detected as in ``without_secrets``, replaced by references."""
    return _replaced(command, by_name=references.refer, in_text=references.text)


def _replaced(
    command: Sequence[str], *, by_name: Callable[[str, str], str], in_text: Callable[[str, str], str]
) -> tuple[str, ...]:
    """Return the command with its secrets replaced.

    Args:
        command: The words.
        by_name: (Name of an option, secret value) -> replacement of the value.
        in_text: (Word that may contain secrets, name before it) -> word without secrets.
    """
    shown: list[str] = []
    option = ""
    """The option whose value may be the next word."""
    for word, following in zip_longest(command, command[1:], fillvalue="-"):
        if option and is_secret(option, word) and (not word.startswith("-") or _is_value(word, option, following)):
            shown.append(by_name(option, word))
            option = option if option.endswith("s") else ""
            continue
        option = ""
        if (assignment := _ASSIGNMENT.fullmatch(word)) is not None:
            name, value = assignment["name"], assignment["value"]
            new = by_name(name, value) if is_secret(name, value) else in_text(value, name)
            shown.append(assignment["head"] + new)
        elif (given := _OPTION.fullmatch(word)) is not None:
            option = given["name"]
            shown.append(word if is_secret_name(option) else in_text(word, ""))
        else:
            option = word if _KEY.fullmatch(word) is not None and is_secret_name(word) else ""
            shown.append(word if option else in_text(word, ""))
    return tuple(shown)


def _is_value(word: str, option: str, following: str) -> bool:
    """Return whether a word that starts with a dash is the value of a secret's option, rather than the next option.

    A word that looks like an option is an option if it has a value: after ``=``, or as the following word.
    """
    if not is_secret_name(option) or len(word) <= _SHORT_OPTION_CHARS:
        return False
    if not word.startswith("--") or _LIKE_AN_OPTION.fullmatch(word) is None:
        return True
    return "=" not in word and following.startswith("-")
