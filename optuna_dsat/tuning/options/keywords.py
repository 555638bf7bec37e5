"""Turn a class of options into a function with typed, documented and checked keyword arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from optuna_dsat.errors import DsatError
from optuna_dsat.study.options.declaration import fields_of, option_of
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import TuneOptions, methods_of

_NO = object()
"""Stands for a value that is not of a type."""
_LONGEST = 60
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    os.PathLike: "a path",
    Mapping: "a dictionary",
    Callable: "a function",
}
_MANY = {int: "whole numbers", float: "numbers", str: "texts", Callable: "functions"}


def coerced(name: str, value: Any, kind: Any, *, alone: bool = True) -> Any:
    """Convert an argument to its declared type: NumPy numbers to Python numbers, any iterable to a tuple.

    None is returned unchanged. ``alone`` tells whether a single element is accepted for a sequence.

    Raises:
        TypeError: If the value has another type; names the argument, the accepted types and the value.
    """
    if value is None:
        return None
    kinds = _alternatives(kind)
    for alternative in kinds:
        result = _as(name, value, alternative, alone=alone)
        if result is not _NO:
            return result
    words = dict.fromkeys(_word(alternative) for alternative in kinds)
    if "a path" in words:
        words.pop("text", None)
    raise TypeError(f"{name} must be {' or '.join(words)}{_example(value, kinds)}; got {_shown(value)}.")


def _alternatives(kind: Any) -> Sequence[Any]:
    """Return the types of a union, without None."""
    if get_origin(kind) in (Union, types.UnionType):
        return [inner for arg in get_args(kind) for inner in _alternatives(arg) if inner is not type(None)]
    return [kind]


def _word(kind: Any) -> str:
    """Describe the values that a type accepts."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is Sequence:
        return f"a list of {_MANY[get_origin(args[0]) or args[0]]}"
    return _WORDS[origin]


def _example(value: Any, kinds: Sequence[Any]) -> str:
    """Suggest the list that a string was probably meant to be; empty if there is none."""
    many = [get_args(kind)[0] for kind in kinds if get_origin(kind) is Sequence]
    if not isinstance(value, str) or not many or get_origin(many[0]) is Callable:
        return ""
    try:
        listed = value.split() if many[0] is str else [many[0](word) for word in value.replace(",", " ").split()]
    except ValueError:
        return ""
    return f", such as {listed!r}" if listed else ""


def _as(name: str, value: Any, kind: Any, *, alone: bool) -> Any:
    """Convert a value to a type; ``_NO`` if it does not match."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return value if isinstance(value, str) else _NO  # allowed values are checked with all other rules
    if origin is Mapping:
        return _mapping(name, value, args[1]) if isinstance(value, Mapping) else _NO
    if origin is Sequence:
        return _sequence(name, value, args[0], alone=alone)
    if origin is os.PathLike:
        return value if isinstance(value, os.PathLike) and isinstance(os.fspath(value), str) else _NO
    return value if origin is Any else _scalar(value, origin)


def _native(value: Any) -> Any:
    """Return a scalar of NumPy as Python's type, other values unchanged."""
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_scalar else value


def _scalar(value: Any, kind: Any) -> Any:
    """Return a number, a boolean or a string as Python's type; ``_NO`` if it does not match."""
    value = _native(value)
    if isinstance(value, bool) or kind in (bool, str):
        return value if isinstance(value, kind) and isinstance(value, bool) is (kind is bool) else _NO
    if kind is int and isinstance(value, float) and not value.is_integer():
        return _NO
    return kind(value) if isinstance(value, int | float) else _NO


def _sequence(name: str, value: Any, kind: Any, *, alone: bool) -> Any:
    """Return the elements as a tuple; ``_NO`` if the value is neither an iterable nor an element."""
    lone = _element(value, kind)
    if lone is not _NO:
        return (lone,) if alone else _NO
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return _NO
    result = []
    for index, item in enumerate(value):
        result.append(_element(item, kind))
        if result[-1] is _NO:
            raise TypeError(f"{name}[{index}] must be {_WORDS[get_origin(kind) or kind]}; got {_shown(item)}.")
    return tuple(result)


def _element(value: Any, kind: Any) -> Any:
    """Convert an element of a sequence; strings also accept paths and numbers, as on a command line."""
    if get_origin(kind) is Callable:
        return value if callable(value) else _NO
    value = _native(value)
    if kind is str and isinstance(value, os.PathLike | int | float) and not isinstance(value, bool):
        return str(value)
    return _scalar(value, kind)


def _mapping(name: str, value: Mapping[Any, Any], kind: Any) -> dict[str, Any]:
    """Return a mapping with string keys, and values of one type or plain data; no value is shown, it may be secret."""
    if kind is Any:
        return dict(plain_data(value, name))
    for key, item in _with_text_keys(value, name).items():
        if not isinstance(item, kind):
            raise TypeError(f"{name}[{key!r}] must be {_WORDS[kind]}; got {type(item).__name__}.")
    return dict(value)


def _with_text_keys(value: Mapping[Any, Any], name: str) -> Mapping[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"The keys of {name} must be text; got {_shown(key)}.")
    return value


def plain_data(value: Any, name: str) -> Any:
    """Convert data to JSON types, also tuples, NumPy scalars and paths; ``TypeError`` has the location of others."""
    value = _native(value)
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, Mapping):
        items = _with_text_keys(value, name).items()
        return {key: plain_data(item, f"{name}[{key!r}]") for key, item in items}
    if isinstance(value, list | tuple):
        return [plain_data(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    what = "a number, text, True, False, None, a list or a dictionary"
    raise TypeError(f"{name} must be {what}; got {type(value).__name__}.")


def _shown(value: Any) -> str:
    """Format a rejected value with its type; only the type unless it is a short scalar."""
    kind, text = type(value).__name__, repr(value) if isinstance(value, str | int | float) else ""
    return f"{text} ({kind})" if text and len(text) <= _LONGEST else kind


_FILL = textwrap.TextWrapper(
    116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
P = ParamSpec("P")
R = TypeVar("R")


def with_keywords(options: Callable[P, TuneOptions]) -> Callable[[Callable[[Given], R]], Callable[P, R]]:
    """Return a decorator from a function of ``Given`` to a function of the fields of ``options``.

    A type checker sees the parameters of the class. Signature and documentation of the function are generated from its
    fields; the documentation replaces the line ``given: {options}``. None means the default.
    """

    def decorate(function: Callable[[Given], R]) -> Callable[P, R]:
        signature = _signature(options)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in signature.parameters:
                    raise TypeError(_unknown(function.__name__, name, signature.parameters))
            given = _coerced(signature.bind(*args, **kwargs).arguments, signature)
            make: Callable[..., TuneOptions] = options
            values = {name: value for name, value in given.items() if value is not None}
            try:
                return function(Given(options=make(**values), origins=dict.fromkeys(given, "argument")))
            except DsatError as error:
                error.args = (_in_keywords(str(error), options), *error.args[1:])
                raise

        del called.__wrapped__
        hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        returned = get_type_hints(function)["return"]
        called.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        called.__annotations__ = {**hints, "return": returned}
        called.__doc__ = (inspect.getdoc(function) or "").replace("    given: {options}", _documented(options))
        return called

    return decorate


def _fields(options: Any) -> list[tuple[Field[Any], Any]]:
    """Return the fields of a class of options with their annotations, positional fields first."""
    return sorted(fields_of(options), key=lambda match: match[0].kw_only is True)


def _signature(options: Callable[..., TuneOptions]) -> inspect.Signature:
    return inspect.Signature([
        inspect.Parameter(
            field_.name,
            inspect.Parameter.KEYWORD_ONLY if field_.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=get_args(hint)[0] if get_origin(hint) is Annotated else hint,
            default=inspect.Parameter.empty if field_.default is MISSING else field_.default,
        )
        for field_, hint in _fields(options)
    ])  # fmt: skip


def _documented(options: Callable[..., TuneOptions]) -> str:
    """Return the entries of the section ``Args``; each lists the methods that read the option before its meaning."""
    entries = []
    for field_, hint in _fields(options):
        option = option_of(hint)
        if option is None:
            raise TypeError(f"The field {field_.name} says no meaning.")
        methods = "".join(f"``{method}``, " for method in methods_of(field_.name)).removesuffix(", ")
        text = f"{field_.name}: {methods}{': ' if methods else ''}{option.keyword_help}"
        entries.append("\n".join(_FILL.wrap(text)))
    return "\n".join(entries)


def _unknown(function: str, name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{function}() got an unexpected keyword argument {name!r}.{hint}"


def _in_keywords(text: str, options: Callable[..., TuneOptions]) -> str:
    """Rename options in a message to keywords, except in commands, which are in backticks."""
    keywords: dict[str, str] = {}
    for field_, hint in _fields(options):
        option = option_of(hint)
        spelled = (f"--{field_.name.replace('_', '-')}", *(() if option is None else option.flags))
        flags = [flag.split("/") for flag in spelled]
        keywords |= {flag[0]: field_.name for flag in flags}
        if isinstance(field_.default, bool):
            keywords |= {off: f"{field_.name}=False" for flag in flags for off in (f"--no-{flag[0][2:]}", *flag[1:])}
    parts = text.split("`")
    parts[::2] = [_FLAG.sub(lambda match: keywords.get(match[0], match[0]), part) for part in parts[::2]]
    return "`".join(parts)


def _coerced(given: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """Convert the arguments to their declared types; a single value is accepted where a keyword takes several."""
    return {
        name: coerced(
            name,
            value,
            signature.parameters[name].annotation,
            alone=signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY,
        )
        for name, value in given.items()
    }
