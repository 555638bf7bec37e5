"""From what Python code gives for an argument to the value that its type says, or one clear ``TypeError``."""

from __future__ import annotations

import operator
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["coerced", "plain_data"]

_NO = object()
"""Stands for a value that is not of a type."""
_LONGEST = 60
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", type(None): "None"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}


def coerced(name: str, value: Any, kind: Any, *, alone: bool = True) -> Any:
    """Return the value of an argument as its type says: numbers of NumPy as Python's, any iterable as a tuple.

    Args:
        name: The argument, for messages.
        value: What was given; None is returned as it is.
        kind: Type of the argument.
        alone: Whether one element stands for a sequence of it.

    Raises:
        TypeError: If the value is of another type; names the argument, what it takes and what was given.
    """
    if value is None:
        return None
    for one in _alternatives(kind):
        found = _as(name, value, one, alone=alone)
        if found is not _NO:
            return found
    raise TypeError(f"{name} must be {_expected(kind)}{_example(value, kind)}; got {_shown(value)}.")


def _alternatives(kind: Any) -> Sequence[Any]:
    """Return the types of a union, without None."""
    if get_origin(kind) in (Union, types.UnionType):
        return [inner for one in get_args(kind) for inner in _alternatives(one) if inner is not type(None)]
    return [kind]


def _example(value: Any, kind: Any) -> str:
    """Return the list that a text was probably meant to be, in words; empty if it is none."""
    many = [get_args(one)[0] for one in _alternatives(kind) if get_origin(one) is Sequence]
    if not isinstance(value, str) or not many:
        return ""
    try:
        listed = value.split() if many[0] is str else [many[0](word) for word in value.replace(",", " ").split()]
    except ValueError:
        return ""
    return f", such as {listed!r}" if listed else ""


def _as(name: str, value: Any, kind: Any, *, alone: bool) -> Any:
    """Return a value as one of a type; ``_NO`` if it is none."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return value if isinstance(value, str) else _NO  # which of them is checked with all other rules
    if origin is Mapping:
        return _mapping(name, value, *get_args(kind)) if isinstance(value, Mapping) else _NO
    if origin is Sequence:
        return _sequence(name, value, get_args(kind)[0], alone=alone)
    if origin is os.PathLike:
        return value if isinstance(value, os.PathLike) and isinstance(os.fspath(value), str) else _NO
    return value if origin is Any else _scalar(value, origin)


def _scalar(value: Any, kind: Any) -> Any:
    """Return a number, a truth value or a text as Python's own; ``_NO`` if it is not of that type."""
    if kind is str:
        return value if isinstance(value, str) else _NO
    if kind is bool:
        return bool(value) if _is_truth(value) else _NO
    if _is_truth(value):
        return _NO
    if kind is int and (isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())):
        return int(value)
    if kind is float and isinstance(value, Real):
        return float(value)
    return _NO


def _is_truth(value: Any) -> bool:
    """Return whether a value is a truth value of Python or NumPy."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def _sequence(name: str, value: Any, kind: Any, *, alone: bool) -> Any:
    """Return the elements as a tuple; ``_NO`` if the value is neither an iterable nor an element."""
    lone = _element(value, kind)
    if lone is not _NO:
        return (lone,) if alone else _NO
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return _NO
    found = []
    for index, one in enumerate(value):
        element = _element(one, kind)
        if element is _NO:
            raise TypeError(f"{name}[{index}] must be {_WORDS.get(kind, 'text')}; got {_shown(one)}.")
        found.append(element)
    return tuple(found)


def _element(value: Any, kind: Any) -> Any:
    """Return an element of a sequence; a text may be given as a path or a number, as words of a command line are."""
    if kind is not str:
        return _scalar(value, kind)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    number = _scalar(value, int if isinstance(value, Integral) else float)
    return _scalar(value, str) if number is _NO else str(number)


def _mapping(name: str, value: Mapping[Any, Any], key_kind: Any, kind: Any) -> dict[str, Any]:
    """Return a mapping of texts, its values of one type or plain data.

    Raises:
        TypeError: If a key or a value is of another type; no value is shown, as it may be secret.
    """
    del key_kind  # all of ours have texts as keys
    if kind is Any:
        return dict(plain_data(value, name))
    for key, one in value.items():
        if not isinstance(key, str):
            raise TypeError(f"The keys of {name} must be text; got {_shown(key)}.")
        if not isinstance(one, kind):
            raise TypeError(f"{name}[{key!r}] must be {_WORDS[kind]}; got {type(one).__name__}.")
    return dict(value)


def plain_data(value: Any, name: str) -> Any:
    """Return data as JSON has them: tuples as lists, NumPy's scalars as Python's, paths as text.

    Raises:
        TypeError: If there is a value that JSON does not have; names its place.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"The keys of {name} must be text; got {_shown(wrong[0])}.")
        return {key: plain_data(one, f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(one, f"{name}[{index}]") for index, one in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if _is_truth(value):
        return bool(value)
    if isinstance(value, Integral):
        return operator.index(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{name} must be a number, text, True, False, None, a list or a dictionary; got {_type_of(value)}.")


def _expected(kind: Any) -> str:
    """Return what a type takes, in words."""
    found = _alternatives(kind)
    words = []
    for one in found:
        origin = get_origin(one) or one
        if origin is Literal:
            words.append(" or ".join(repr(choice) for choice in get_args(one)))
        elif origin is Sequence:
            words.append(f"a list of {_MANY[get_args(one)[0]]}")
        elif origin is Mapping:
            words.append("a dictionary")
        elif origin is os.PathLike:
            words.append("a path")
        elif origin is not str or not any(get_origin(other) is os.PathLike for other in found):
            words.append(_WORDS[origin])
    return " or ".join(words)


def _type_of(value: Any) -> str:
    return type(value).__name__


def _shown(value: Any) -> str:
    """Return a value that was refused with its type; the type alone of what is not a short scalar."""
    text = repr(value) if isinstance(value, str | int | float) else ""
    return f"{text} ({_type_of(value)})" if text and len(text) <= _LONGEST else _type_of(value)
