"""The ``optuna-dsat`` command.

Importing it imports neither torch nor Optuna, nor any command. Each command is imported when it is called, and its
dependencies when it runs.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from optuna_dsat.cli.parsing.catalogue import TAKE_LAUNCHER, Catalogue
from optuna_dsat.cli.parsing.help import HELP_NAMES
from optuna_dsat.cli.parsing.options_file import FILE, OF_COMMAND, OPTIONS_ENV, file_of
from optuna_dsat.cli.parsing.rewriting import COUNTS, hide_secrets, lift_option, spread_numbers
from optuna_dsat.display.stopping import EXIT_INTERRUPTED
from optuna_dsat.errors import PATH_ERRORS, DsatError, ScriptFailedError, UsageError, exit_code_of, failed_file
from optuna_dsat.escape.terminal import drop_lost_terminal, one_line, say, say_prose
from optuna_dsat.runtime.files import TEXT_CHARS, shortened
from optuna_dsat.secrecy.references import hidden_text
from optuna_dsat.signals import ENDING, handling
from optuna_dsat.version import __version__

__all__ = ["app", "main"]

LINE_CHARS = 900
"""Maximum length of an error message about the user's input, in characters."""
_NOT_NEEDED = "mako.ext.pygmentplugin"
"""Module that colours Mako's error pages.

Alembic imports Mako, and this module imports all of pygments, which takes a tenth of a command's start-up time.
"""
_OBJECTS_BETWEEN_COLLECTIONS = 200_000
"""Threshold of the youngest generation: imports make no garbage, and collecting takes a tenth of the start-up time."""
EXIT_NO_READER = 1
"""Exit code for a closed stdout; typer's own."""

_STARTERS = ("bash", "mpirun", "python", "srun")
"""Programs that start a training, besides launchers."""
_STUDY_OPTIONS = ("--study", "--name", "--study-name")

app = typer.Typer(
    name="optuna-dsat",
    help="Find the DeepSpeed configuration that trains your model fastest on the GPUs you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=Catalogue,
    context_settings={"help_option_names": list(HELP_NAMES)},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"optuna-dsat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    options: Annotated[
        Path | None,
        typer.Option(
            help="Take options from this TOML file.  \\[default: \\[tool.optuna-dsat] of the nearest pyproject.toml]",
            envvar=OPTIONS_ENV,
        ),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    file = file_of(options, cwd=Path.cwd(), on_ignored=lambda text: say_prose(text, file=sys.stderr))
    if file is not None and isinstance(context.command, TyperGroup):
        context.default_map = file.default_map(context.command, context)
        context.ensure_object(dict)[FILE] = str(file.path)


def _commands() -> TyperGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def _tell(text: str) -> None:
    """Report why the command ends; if stderr is closed, only the exit code reports it."""
    with _unwritable_stderr_ignored():
        say_prose(f"optuna-dsat: {text}", file=sys.stderr)


@contextlib.contextmanager
def _unwritable_stderr_ignored() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError):
        _drop(sys.stderr)


def _report(error: DsatError) -> None:
    text = hidden_text(str(error))
    shown = one_line(text, limit_chars=LINE_CHARS) if isinstance(error, UsageError) else text
    _tell(shown)
    if isinstance(error, ScriptFailedError):
        with _unwritable_stderr_ignored():
            if error.traceback_tail:
                say(f"\n{shortened(hidden_text(error.traceback_tail.rstrip()), TEXT_CHARS)}", file=sys.stderr)
            if error.log_path:
                say(f"\nFull log: {error.log_path}", file=sys.stderr)


def _open_streams() -> None:
    """Open the standard streams that are closed: files opened later would get their descriptors."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _drop(stream: TextIO) -> None:
    """Discard the unwritten data of a stream, which would fail again at interpreter exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _check_folder() -> None:
    """Raise if the working directory was deleted or may not be entered."""
    try:
        Path.cwd()
        Path().stat()
    except FileNotFoundError:
        raise UsageError("The working directory was deleted: change to one that exists.") from None
    except OSError as error:
        raise UsageError(f"The working directory cannot be used: {error.strerror}. Change to another one.") from None


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command; exit with 0 (found), 2 (usage), 3 (nothing runs), 4 (script error), 5 (database) or 130."""
    _open_streams()
    if argv is None:
        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        hide_secrets()
        sys.modules.setdefault(_NOT_NEEDED, None)  # type: ignore[arg-type]  # documented by Python, but not importable
    try:
        with handling(ENDING, _interrupt):
            _run(sys.argv[1:] if argv is None else argv)
    finally:
        if argv is None:
            gc.freeze()  # avoids a garbage collection over all modules at exit, a fifth of the start-up time


def _interrupt(number: int, _frame: object) -> NoReturn:
    if number == signal.SIGHUP:
        drop_lost_terminal()
    raise KeyboardInterrupt


def _hint(error: TyperException, context: typer.Context, arguments: Sequence[str]) -> str:
    """Return how a command takes the script, its options or a study, if that was probably meant."""
    from optuna_dsat.script.command.interceptor import LAUNCHERS

    params, begin = context.command.params, (*LAUNCHERS, *_STARTERS)
    if context.parent is None and any(word in begin or Path(word).is_file() for word in arguments[:1]):
        return f" To tune it: optuna-dsat tune {shlex.join(arguments)}."
    name = getattr(error, "option_name", None)
    if name is not None and any(param.name == "script_args" for param in params) and name not in _STUDY_OPTIONS:
        return " Options of the script follow --."
    if name not in _STUDY_OPTIONS:
        return ""
    if any("--study" in param.opts for param in params):
        return " --study names the study."
    takes = any(param.param_type_name == "argument" for param in params)
    return f" The study is an argument: {context.command_path} STUDY." if takes else ""


def _run(arguments: list[str]) -> NoReturn:
    """Run the command; exit as ``main``."""
    try:
        _check_folder()
        arguments = lift_option(spread_numbers(arguments, *COUNTS), "--options")
        commands, known = _commands(), dict[str, Any]()
        if TAKE_LAUNCHER.intersection(arguments):
            from optuna_dsat.cli.parsing.launch_prefix import unfold_command

            unfolded = unfold_command(arguments, commands, cwd=Path.cwd())
            arguments, known[OF_COMMAND] = unfolded.apply(), unfolded.of_command
        code = commands.main(args=arguments, standalone_mode=False, obj=known)
        sys.stdout.flush()  # a closed pipe raises here rather than at the interpreter's exit
    except DsatError as error:
        _report(error)
        sys.exit(error.exit_code)
    except TyperException as error:
        context = getattr(error, "ctx", None)  # only usage errors have this attribute
        remedy = "" if context is None else f"{_hint(error, context, arguments)} See {context.command_path} --help."
        if error.format_message():  # empty if the help was shown instead
            from optuna_dsat.runtime.failure import rule_in_words

            text = one_line(rule_in_words(error.format_message().rstrip(".")), limit_chars=LINE_CHARS)
            end = "" if text.endswith(("?", "!")) else "."
            _tell(f"{text}{end}{remedy}")
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of stdout, such as `head`, has closed it
        _drop(sys.stdout)
        sys.exit(EXIT_NO_READER)
    except MemoryError:
        _tell("The machine, or the limit of this shell (ulimit -v), has no memory left for the command itself.")
        sys.exit(DsatError.exit_code)
    except OSError as error:
        if error.errno in PATH_ERRORS:  # a running search reports this itself
            what = "" if error.filename is None else f"{error.filename}: "
            _tell(one_line(f"{what}{error.strerror}.", limit_chars=LINE_CHARS))
            sys.exit(exit_code_of(error))
        if error.errno == errno.EIO and drop_lost_terminal():  # the terminal is gone
            sys.exit(EXIT_NO_READER)
        # otherwise an unexpected disk failure
        _tell(str(failed_file(error)))
        _drop(sys.stdout)
        sys.exit(exit_code_of(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code or 0)
