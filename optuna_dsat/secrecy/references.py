"""Secrets of commands and launches: stored as ``${OPTUNA_DSAT_SECRET_NAME}``, and read from the environment.

Stored and displayed text contains references only. Their values are looked up in this order: values passed to this
process (``keep``), the environment variable of the same name, and, for a reference such as
``OPTUNA_DSAT_SECRET_HF_TOKEN`` whose remainder is the name of a secret, the variable ``HF_TOKEN``.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from optuna_dsat.secrecy.names import is_secret, is_secret_name
from optuna_dsat.secrecy.shapes import HIDDEN, find_secrets, hidden, replaced

PREFIX = "OPTUNA_DSAT_SECRET_"
"""Prefix of the variables' names."""

_REFERENCE = re.compile(rf"\$\{{(?P<name>{PREFIX}[A-Z0-9_]+)(?::\?)?\}}")
"""A reference as stored, or as in a shell's error about a missing variable."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LEAST_KNOWN_CHARS = 6
"""Minimum length of values to search for in other texts; shorter values would match by chance."""

_given: dict[str, str] = {}
"""Variable -> value, of this process; never written anywhere."""


def keep(values: Mapping[str, str]) -> None:
    """Remember values of references until this process ends."""
    _given.update(values)


def secrets() -> dict[str, str]:
    """Return the remembered values of references, as variables for a process that replaces this one."""
    return {**_given}


def value_of(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the value of a reference; None if it is unknown in this process."""
    environ = os.environ if environ is None else environ
    if name in _given:
        return _given[name]
    bare = name.removeprefix(PREFIX)
    return environ.get(name) or (environ.get(bare) if "_" in bare and is_secret_name(bare) else None)


def names_in(data: Any) -> list[str]:
    """Return the variables of the references in data, without duplicates, in order of occurrence."""
    texts: dict[str, None] = {}

    def note(text: str) -> str:
        texts.update(dict.fromkeys(match["name"] for match in _REFERENCE.finditer(text)))
        return text

    _mapped(data, note)
    return list(texts)


def values_for(data: Any, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the known values of the references in data: variable -> value."""
    values = {name: value_of(name, environ) for name in names_in(data)}
    return {name: value for name, value in values.items() if value is not None}


def resolved(data: Any, environ: Mapping[str, str] | None = None) -> Any:
    """Return data with references replaced by their values; unknown references stay."""

    def resolve(text: str) -> str:
        return _REFERENCE.sub(lambda match: value_of(match["name"], environ) or match[0], text)

    return _mapped(data, resolve)


def _mapped(data: Any, function: Callable[[str], str]) -> Any:
    if isinstance(data, str):
        return function(data) if "${" in data else data
    if isinstance(data, Mapping):
        return {key: _mapped(value, function) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)([_mapped(item, function) for item in data])
    return data


def shell_join(words: Iterable[str]) -> str:
    """Return a command for a shell, which fails if the variable of a reference is not set."""
    return " ".join(_shell_word(word) for word in words)


def _shell_word(word: str) -> str:
    parts, end = [], 0
    for match in _REFERENCE.finditer(word):
        parts += [*_quoted(word[end : match.start()]), f'"${{{match["name"]}:?}}"']
        end = match.end()
    return "".join([*parts, *_quoted(word[end:])]) if parts else shlex.quote(word)


def _quoted(text: str) -> list[str]:
    return [shlex.quote(text)] if text else []


def hidden_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return a message without secrets, detected by shape or known in the environment, by default this process's."""
    environ = os.environ if environ is None else environ
    known = {value for name, value in environ.items() if is_secret_name(name) and is_secret(name, value)}
    known |= {value for name, value in environ.items() if name.startswith(PREFIX)}
    for value in sorted({*known, *_given.values()}, key=len, reverse=True):
        if len(value) >= _LEAST_KNOWN_CHARS:
            text = text.replace(value, HIDDEN)
    return hidden(text)


class References:
    """Replace secrets by references, and collect their values; names are reproducible, and names in ``taken`` stay."""

    def __init__(self, *taken: Any) -> None:
        self.values: dict[str, str] = {}
        """Variable -> value."""
        self._taken = {name for data in taken for name in names_in(data)}

    def refer(self, name: str, value: str) -> str:
        """Return the reference to a named value."""
        words = [word for part in re.split(r"[^A-Za-z0-9]+", name) for word in _CAMEL.split(part) if word]
        base = PREFIX + ("_".join(words).upper() or "ARGUMENT")
        number = 1
        while (variable := base if number == 1 else f"{base}_{number}") in self._taken or (
            self.values.get(variable, value) != value
        ):
            number += 1
        self.values[variable] = value
        return f"${{{variable}}}"

    def text(self, text: str, name: str = "") -> str:
        """Return a text with its secrets replaced; the whole text if ``name`` denotes a secret."""
        if name and is_secret(name, text):
            return self.refer(name, text)
        end, parts = 0, []
        for secret in find_secrets(text):
            parts += [text[end : secret.start], self.refer(secret.name or name, text[secret.start : secret.end])]
            end = secret.end
        return "".join([*parts, text[end:]])

    def data(self, data: Any, name: str = "") -> Any:
        """Return JSON data with its secrets replaced; names of nested keys are joined by dots."""
        if isinstance(data, Mapping):
            return {key: self.data(value, f"{name}.{key}".lstrip(".")) for key, value in data.items()}
        if isinstance(data, (list, tuple)):
            return [self.data(item, name) for item in data]
        return self.text(data, name) if isinstance(data, str) else data


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

    ``by_name`` gets the name of an option and its secret value, ``in_text`` a word that may contain secrets and the
    name before it.
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
