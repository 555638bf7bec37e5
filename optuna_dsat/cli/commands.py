"""Commands made from classes of options, and the rewriting of arguments before they are parsed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from optuna_dsat.tuning.declaration import Option, option_of

__all__ = ["lift_option", "origins_of", "spread_numbers", "with_options"]


def with_options(run: Callable[..., None], doc: str | None = None) -> Callable[..., None]:
    """Return a command function whose parameters are the fields of the classes of options that ``run`` takes.

    Args:
        run: Function whose parameters are annotated with dataclasses, their fields with ``Option`` or typer's own
            parameters; or with ``typer.Context``, for the command's context.
        doc: Help of the command; None for the docstring of ``run``.
    """
    kinds = {name: hint for name, hint in get_type_hints(run).items() if name != "return"}
    classes: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}
    of_class = {name: _parameters(kind) for name, kind in classes.items()}

    def command(context: typer.Context, **values: Any) -> None:
        arguments: dict[str, Any] = {name: context for name in kinds if name not in classes}
        for name, kind in classes.items():
            parsers = {one.name: _parser(one.annotation) for one in of_class[name]}
            arguments[name] = kind(**{field: parse(values[field]) for field, parse in parsers.items()})
        run(**arguments)

    own = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [own, *(one.replace(annotation=_for_typer(one)) for found in of_class.values() for one in found)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = run.__doc__ if doc is None else doc
    return command


def _parameters(options: Any) -> list[inspect.Parameter]:
    """Return the fields of a class of options as keyword-only parameters."""
    hints = get_type_hints(options, include_extras=True)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[one.name],
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in fields(options)
    ]


def _parser(annotation: Any) -> Callable[[Any], Any]:
    option = option_of(annotation)
    return option.parse if option is not None and option.parse is not None else lambda value: value


def _for_typer(parameter: inspect.Parameter) -> Any:
    """Return the annotation of a field as typer reads it."""
    option = option_of(parameter.annotation)
    if option is None:
        return parameter.annotation
    kind = get_args(parameter.annotation)[0] if option.text_type is None else option.text_type
    if option.panel is None:
        return Annotated[kind, typer.Argument(help=option.command_help, metavar=option.metavar, show_default=False)]
    flags = option.flags
    if not flags and parameter.default is False:
        flags = ("--" + parameter.name.replace("_", "-"),)  # no --no-... to switch off what is off
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
    if option.choices is None:
        return None
    choices = option.choices

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices() if choice.startswith(incomplete)]

    return complete


def origins_of(context: typer.Context, names: Iterable[str]) -> dict[str, str]:
    """Return the origin of each of ``names`` that was given: ``command line``, a variable's name or a file's."""
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


def spread_numbers(argv: list[str], option: str) -> list[str]:
    """Return ``argv`` with ``option 1 2 3`` written as ``option 1,2,3``: an option takes one value.

    Arguments after ``--`` stay.
    """
    result: list[str] = []
    tokens = iter(enumerate(argv))
    skip_to = 0
    for index, token in tokens:
        if index < skip_to:
            continue
        if token == "--":
            return result + argv[index:]
        result.append(token)
        if token == option:
            end = index + 1
            while end < len(argv) and argv[end].replace(",", "").isdigit():
                end += 1
            if end > index + 2:
                result.append(",".join(argv[index + 1 : end]))
                skip_to = end
    return result


def lift_option(argv: list[str], option: str) -> list[str]:
    """Return ``argv`` with ``option VALUE`` moved to the front, where options of all commands are parsed.

    Arguments after ``--`` stay.
    """
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
