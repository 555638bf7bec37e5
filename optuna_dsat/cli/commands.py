"""From a dataclass of options to a command, and what is done to the arguments before they are parsed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["lift_option", "origins_of", "spread_numbers", "with_options"]

Options = TypeVar("Options", bound="DataclassInstance")


def with_options(options: type[Options], run: Callable[[Options], None], doc: str) -> Callable[..., None]:
    """Return a command function whose parameters are the fields of ``options``; it calls ``run`` with them.

    A field ``origins`` is no parameter: it says where each parameter that was given comes from.
    """
    told = any(field.name == "origins" for field in fields(options))

    def command(context: typer.Context, **values: Any) -> None:
        origins = {"origins": origins_of(context, values)} if told else {}
        run(cast(Any, options)(**values, **origins))

    hints = get_type_hints(options, include_extras=True)
    offered = [field for field in fields(options) if field.name != "origins"]
    own = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            own,
            *(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=hints[field.name],
                    default=inspect.Parameter.empty if field.default is MISSING else field.default,
                )
                for field in offered
            ),
        ]
    )
    command.__annotations__ = {"context": typer.Context, **{field.name: hints[field.name] for field in offered}}
    command.__doc__ = doc
    return command


def origins_of(context: typer.Context, names: Iterable[str]) -> dict[str, str]:
    """Return where each parameter that was given comes from: the command line, a variable's name, a file's name."""
    variables = {param.name: param.envvar for param in context.command.params}
    origins = {}
    for name in names:
        source = context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        if source.name == "DEFAULT_MAP":
            origins[name] = str(context.find_root().obj)  # the file that main's callback read
        elif source.name == "ENVIRONMENT":
            origins[name] = str(variables[name])
        else:
            origins[name] = "command line"
    return origins


def spread_numbers(argv: list[str], option: str) -> list[str]:
    """Return ``argv`` with ``option 1 2 3`` written as ``option 1,2,3``, which click understands.

    Only what stands before ``--`` is touched.
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
    """Return ``argv`` with ``option VALUE`` at its front, where options of all commands are parsed.

    Only what stands before ``--`` is touched.
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
