"""Commands generated from classes of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from optuna_dsat.study.options.declaration import PANELS, Option, fields_of, option_of, options_in

__all__ = ["first_options", "origins_of", "takes_options", "with_options"]


def takes_options(run: Callable[..., None]) -> bool:
    """Return whether a function takes a class of options, see ``with_options``."""
    return bool(_classes(run))


def first_options(run: Callable[..., None]) -> frozenset[str]:
    """Return the options that a command's help shows first; empty for all.

    Args:
        run: As in ``with_options``, or any other function.
    """
    declared = (options_in(kind) for kind in _classes(run).values())
    return frozenset(name for options in declared for name, option in options.items() if option.first)


def _classes(run: Callable[..., None]) -> dict[str, Any]:
    """Return the classes of options that a function takes, by parameter name."""
    hints = get_type_hints(run).items()
    return {name: kind for name, kind in hints if name != "return" and is_dataclass(kind)}


def with_options(run: Callable[..., None], doc: str | None = None) -> Callable[..., None]:
    """Return a command function whose parameters are the fields of the option classes that ``run`` takes.

    Args:
        run: Function whose parameters are annotated with dataclasses, their fields with ``Option`` or typer's own
            parameters; or with ``typer.Context``, for the command's context.
        doc: Help of the command; None for the docstring of ``run``.
    """
    kinds = {name: hint for name, hint in get_type_hints(run).items() if name != "return"}
    classes = _classes(run)
    of_class = {name: _parameters(kind) for name, kind in classes.items()}

    def command(context: typer.Context, **values: Any) -> None:
        arguments: dict[str, Any] = {name: context for name in kinds if name not in classes}
        for name, kind in classes.items():
            parsers = {parameter.name: _parser(parameter.annotation) for parameter in of_class[name]}
            arguments[name] = kind(**{field: parse(values[field]) for field, parse in parsers.items()})
        run(**arguments)

    own = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [
        own,
        *(parameter.replace(annotation=_for_typer(parameter)) for result in of_class.values() for parameter in result),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = run.__doc__ if doc is None else doc
    return command


def _parameters(options: Any) -> list[inspect.Parameter]:
    """Return the fields of a class of options as keyword-only parameters."""
    parameters = [
        inspect.Parameter(
            field_.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=annotation,
            default=inspect.Parameter.empty if field_.default is MISSING else field_.default,
        )
        for field_, annotation in fields_of(options)
    ]
    return sorted(parameters, key=_place)


def _place(parameter: inspect.Parameter) -> int:
    """Return the position of a parameter's panel in the help; arguments come first."""
    option = option_of(parameter.annotation)
    return -1 if option is None or option.panel is None else PANELS.index(option.panel)


def _parser(annotation: Any) -> Callable[[Any], Any]:
    option = option_of(annotation)
    return option.parse if option is not None and option.parse is not None else lambda value: value


def _for_typer(parameter: inspect.Parameter) -> Any:
    """Return the annotation of a field in typer's form."""
    option = option_of(parameter.annotation)
    if option is None:
        return parameter.annotation
    declared = get_args(parameter.annotation)[0]
    is_list = {get_origin(arg) for arg in get_args(declared)} & {Sequence, Mapping}
    kind = option.text_type or (list[str] | None if is_list else declared)
    if option.panel is None:
        return Annotated[kind, typer.Argument(help=option.command_help, metavar=option.metavar, show_default=False)]
    flags = option.flags
    if not flags and parameter.default is False:
        flags = ("--" + parameter.name.replace("_", "-"),)  # no --no-... for a flag that is off by default
    return Annotated[
        kind,
        typer.Option(
            *flags,
            help=option.command_help,
            metavar=option.metavar,
            envvar=option.env,
            autocompletion=_completion(option),
            rich_help_panel=option.panel,
        ),
    ]


def _completion(option: Option) -> Callable[[str], list[str]] | None:
    if not option.choices:
        return None
    return lambda incomplete: [choice for choice in option.choices if choice.startswith(incomplete)]


def origins_of(context: typer.Context, names: Iterable[str]) -> dict[str, str]:
    """Return the origin of each given option in ``names``: ``command line``, a variable's name or a file's."""
    variables = {param.name: param.envvar for param in context.command.params}
    origins = {}
    for name in names:
        source = context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        if source.name == "DEFAULT_MAP":
            origins[name] = str(context.find_root().obj)  # the file that the callback of all commands read
        elif source.name == "ENVIRONMENT":
            origins[name] = str(variables[name])
        else:
            origins[name] = "command line"
    return origins
