"""Commands generated from classes of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from optuna_dsat.cli.parsing.options_file import FILE, OF_COMMAND
from optuna_dsat.cli.parsing.parameters import finite
from optuna_dsat.study.options.declaration import PANELS, Option, fields_of, option_of, options_in


def first_options(run: Callable[..., None]) -> frozenset[str]:
    """Return the options that a command's help shows first; empty for all."""
    declared = (options_in(kind) for kind in option_classes(run).values())
    return frozenset(name for options in declared for name, option in options.items() if option.first)


def option_classes(run: Callable[..., None]) -> dict[str, Any]:
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
    names = [name for name in get_type_hints(run) if name != "return"]
    classes = option_classes(run)
    declared = {
        name: [(field_, option_of(hint), hint) for field_, hint in fields_of(kind)] for name, kind in classes.items()
    }

    def command(context: typer.Context, **values: Any) -> None:
        arguments: dict[str, Any] = dict.fromkeys(names, context)
        for name, kind in classes.items():
            given = {
                field_.name: option.parse(values[field_.name]) if option and option.parse else values[field_.name]
                for field_, option, _ in declared[name]
            }
            arguments[name] = kind(**given)
        run(**arguments)

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context]
    for fields in declared.values():
        parameters += [
            inspect.Parameter(
                field_.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hint if option is None else _for_typer(field_, option, hint),
                default=inspect.Parameter.empty if field_.default is MISSING else field_.default,
            )
            for field_, option, hint in sorted(fields, key=lambda item: _place(item[1]))
        ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = run.__doc__ if doc is None else doc
    return command


def _for_typer(field_: Field[Any], option: Option, hint: Any) -> Any:
    """Return the annotation of a field in typer's form."""
    declared = get_args(hint)[0]
    is_list = {get_origin(arg) for arg in get_args(declared)} & {Sequence, Mapping}
    kind = option.text_type or (list[str] | None if is_list else declared)
    if option.panel is None:
        return Annotated[kind, typer.Argument(help=option.command_help, metavar=option.metavar, show_default=False)]
    flags = option.flags
    if not flags and field_.default is False:
        flags = ("--" + field_.name.replace("_", "-"),)  # no --no-... for a flag that is off by default
    return Annotated[kind, _parameter(option, *flags, rich_help_panel=option.panel)]


def again(kind: type[Any], name: str) -> Any:
    """Return typer's parameter of an option that a class declares, for a command that takes it as well."""
    option = options_in(kind)[name]
    return _parameter(option, f"--{option.spelled(name)}")


def _parameter(option: Option, *flags: str, **more: Any) -> Any:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in option.choices if choice.startswith(incomplete)]

    return typer.Option(
        *flags,
        help=option.command_help,
        metavar=option.metavar,
        envvar=option.env,
        min=option.least,
        callback=None if option.least is None else finite,
        autocompletion=complete if option.choices else None,
        **more,
    )


def _place(option: Option | None) -> int:
    """Return the position of an option's panel in the help; arguments come first."""
    return -1 if option is None or option.panel is None else PANELS.index(option.panel)


def origins_of(context: typer.Context, names: Iterable[str]) -> dict[str, str]:
    """Return the origin of each given option in ``names``: ``command line``, the command, a variable, a file."""
    params, known = {param.name: param for param in context.command.params}, context.find_root().ensure_object(dict)
    origins = {}
    for name in names:
        source = context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        if source.name == "DEFAULT_MAP":
            origins[name] = known[FILE]
        elif source.name == "ENVIRONMENT":
            origins[name] = str(params[name].envvar)
        else:
            is_of_command = known.get(OF_COMMAND, frozenset()).intersection(params[name].opts)
            origins[name] = "training command" if is_of_command else "command line"
    return origins
