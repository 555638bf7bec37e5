"""From a class of options to a function that takes them as keywords, typed, documented and checked."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from optuna_dsat.errors import DsatError
from optuna_dsat.tuning.coercion import coerced
from optuna_dsat.tuning.declaration import option_of
from optuna_dsat.tuning.given import Given
from optuna_dsat.tuning.options import TuneOptions, methods_of

__all__ = ["with_keywords"]

_FILL = textwrap.TextWrapper(
    116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
P = ParamSpec("P")
R = TypeVar("R")


def with_keywords(
    options: Callable[P, TuneOptions],
) -> Callable[[Callable[[Given], R]], Callable[P, R]]:
    """Return a decorator: from a function of ``Given`` to one of the fields of ``options``, a class of options.

    A type checker sees the parameters of the class; signature and documentation of the function are made of its fields,
    the latter in place of the line ``given: {options}``. None stands for the default.
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


def _fields(options: Callable[..., TuneOptions]) -> Iterator[tuple[Field[Any], Any]]:
    """Yield the fields of a class of options with their annotations, positional ones first."""
    hints = get_type_hints(options, include_extras=True)
    found = fields(options)  # type: ignore[arg-type]  # typed as its constructor
    for one in sorted(found, key=lambda one: one.kw_only is True):
        yield one, hints[one.name]


def _signature(options: Callable[..., TuneOptions]) -> inspect.Signature:
    return inspect.Signature([
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY if one.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=get_args(hint)[0] if get_origin(hint) is Annotated else hint,
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one, hint in _fields(options)
    ])  # fmt: skip


def _documented(options: Callable[..., TuneOptions]) -> str:
    """Return the entries of the section ``Args``, with the methods that read an option before its meaning."""
    entries = []
    for one, hint in _fields(options):
        option = option_of(hint)
        if option is None:
            raise TypeError(f"The field {one.name} says no meaning.")
        methods = "".join(f"``{method}``, " for method in methods_of(one.name)).removesuffix(", ")
        text = f"{one.name}: {methods}{': ' if methods else ''}{option.keyword_help}"
        entries.append("\n".join(_FILL.wrap(text)))
    return "\n".join(entries)


def _unknown(function: str, name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{function}() got an unexpected keyword argument {name!r}.{hint}"


def _in_keywords(text: str, options: Callable[..., TuneOptions]) -> str:
    """Return a message in which options have the names of keywords, but for those of commands, in backticks."""
    keywords: dict[str, str] = {}
    for one, hint in _fields(options):
        option = option_of(hint)
        spelled = (f"--{one.name.replace('_', '-')}", *(() if option is None else option.flags))
        flags = [flag.split("/") for flag in spelled]
        keywords |= {flag[0]: one.name for flag in flags}
        if isinstance(one.default, bool):
            keywords |= {off: f"{one.name}=False" for flag in flags for off in (f"--no-{flag[0][2:]}", *flag[1:])}
    parts = text.split("`")
    parts[::2] = [_FLAG.sub(lambda found: keywords.get(found[0], found[0]), part) for part in parts[::2]]
    return "`".join(parts)


def _coerced(given: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """Return the arguments as their types say; where a keyword takes several values, one may stand alone.

    Raises:
        TypeError: If one is of another type.
    """
    return {
        name: coerced(
            name,
            value,
            signature.parameters[name].annotation,
            alone=signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY,
        )
        for name, value in given.items()
    }
