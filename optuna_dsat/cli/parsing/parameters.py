"""Parameters shared by several commands, with their shell completion."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_dsat.errors import DsatError, UsageError
from optuna_dsat.escape.terminal import say
from optuna_dsat.runtime.files import stream_of, write_output
from optuna_dsat.study.options.declaration import DEFAULT_STORAGE, STORAGE_ENV

if TYPE_CHECKING:
    from optuna_dsat.store import Store

option = partial(typer.Option, show_default=False)
"""Option without a default, or whose help names its default."""
_MOST_CHARS = 2**20
"""Number of leading characters from which the program that wrote a file is recognised; a config is shorter."""


def complete_studies(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of stored studies with this prefix; empty if the storage does not respond."""
    try:
        from optuna_dsat.store import Store

        with Store.open(_storage_of(context), create=False, retry_limit_s=0.0) as store:
            return [study.name for study in store.list_studies() if study.name.startswith(incomplete)]
    except DsatError:
        return []  # a completion cannot show a message


def _storage_of(context: typer.Context) -> str:
    """Return the storage of an incomplete command line: its option, the environment, an options file or the default."""
    from optuna_dsat.cli.parsing.options_file import file_of

    given = context.params.get("storage")
    if given and given != DEFAULT_STORAGE:
        return str(given)
    if os.environ.get(STORAGE_ENV):
        return os.environ[STORAGE_ENV]
    named = context.find_root().params.get("options")
    file = file_of(Path(named) if named else None, cwd=Path.cwd())
    return DEFAULT_STORAGE if file is None else str(file.table.get("storage", DEFAULT_STORAGE))


Storage = Annotated[
    str,
    typer.Option("--storage", help="Database of the study: SQLite or PostgreSQL.", envvar=STORAGE_ENV),
]
Name = Annotated[
    str,
    typer.Argument(metavar="STUDY", help="Name of the study.", show_default=False, autocompletion=complete_studies),
]
LatestName = Annotated[
    str | None,
    typer.Argument(
        metavar="[STUDY]",
        help="Name of the study.  \\[default: the latest study]",
        show_default=False,
        autocompletion=complete_studies,
    ),
]


def finite(value: float | None) -> float | None:
    """Return the value of an option, a finite number or None; ``BadParameter`` for others."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("it must be a finite number.")
    return value


@contextmanager
def opened(storage: str, name: str | None) -> Iterator[tuple[Store, str]]:
    """Open a database for the block, with the name of a study, by default the latest one."""
    from optuna_dsat.store import Store
    from optuna_dsat.study.stored import latest_study

    with Store.open(storage, create=False) as store:
        yield store, latest_study(store) if name is None else name


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the result.")]


def confirm_replacing(path: Path, *, is_ours: Callable[[str], bool]) -> None:
    """Prompt before replacing a file whose content this command did not write, by ``is_ours``; not of a pipe.

    Raises:
        UsageError: If a prompt is not possible.
        typer.Abort: If the answer is no.
    """
    try:
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            content = file.read(_MOST_CHARS)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    if not content or stream_of(path) is not None or is_ours(content):
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{path} exists and was not written by this command: remove it or choose another file.")
    typer.confirm(f"{path} exists and was not written by this command. Replace it?", abort=True, err=True)


def write(path: Path, text: str) -> None:
    """Write an output file and print its path; ``UsageError`` if it cannot be written."""
    try:
        write_output(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    say_written(path)


def say_written(path: Path) -> None:
    """Print the path of an output file; not of a pipe or device."""
    if path.is_file() and stream_of(path) is None:
        say(path)
