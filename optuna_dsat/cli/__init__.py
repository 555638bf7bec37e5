"""The ``optuna-dsat`` command. Importing it pulls in neither torch nor Optuna; each command imports what it runs."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from optuna_dsat import __version__
from optuna_dsat.cli.dashboard import dashboard
from optuna_dsat.cli.explain import explain
from optuna_dsat.cli.options import (
    AshaOptions,
    AutotuningOptions,
    BinaryOptions,
    GuidedOptions,
    RandomOptions,
    spread_numbers,
    with_options,
)
from optuna_dsat.cli.password import hide_password
from optuna_dsat.cli.plan import plan
from optuna_dsat.cli.studies import add_commands
from optuna_dsat.cli.train import train
from optuna_dsat.errors import DsatError, ScriptFailedError

__all__ = ["app", "main"]

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="optuna-dsat",
    help="Find the DeepSpeed configuration that trains your model fastest on the GPUs you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"optuna-dsat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _random(options: RandomOptions) -> None:
    from optuna_dsat.cli.tune import run

    run("random", options)


def _binary(options: BinaryOptions) -> None:
    from optuna_dsat.cli.tune import run

    run("binary", options)


def _asha(options: AshaOptions) -> None:
    from optuna_dsat.cli.tune import run

    run("asha", options)


def _guided(options: GuidedOptions) -> None:
    from optuna_dsat.cli.tune import run

    run("guided", options)


def _tune(options: AutotuningOptions) -> None:
    from optuna_dsat.cli.tune import run

    run(None, options)


def _run(options: AutotuningOptions) -> None:
    from optuna_dsat.cli.tune import run

    run(None, replace(options, run_full_experiment=True))


app.command("random")(
    with_options(
        RandomOptions,
        _random,
        "Search random configurations; knowledge of DeepSpeed and the search's history stop those that cannot win.",
    )
)
app.command("binary")(with_options(BinaryOptions, _binary, "Bisect the micro-batch of randomly drawn configurations."))
app.command("asha")(
    with_options(
        AshaOptions,
        _asha,
        "Bisect the micro-batch of random configurations, giving more launches to the best (successive halving).",
    )
)
app.command("guided")(
    with_options(
        GuidedOptions,
        _guided,
        "Plan every launch: memory and step time are modelled, fitted to what was measured, and the best is run next.",
    )
)
app.command("tune")(
    with_options(
        AutotuningOptions,
        _tune,
        "Search by the autotuning section of your config, as deepspeed --autotuning=tune does.",
    )
)
app.command("run")(
    with_options(
        AutotuningOptions,
        _run,
        "As tune, then train with the best configuration, as deepspeed --autotuning=run does.",
    )
)
add_commands(app)
app.command("plan")(plan)
app.command("explain")(explain)
app.command("train")(train)
app.command("dashboard")(dashboard)


def _report(error: DsatError) -> None:
    sys.stderr.write(f"optuna-dsat: {error}\n")
    if isinstance(error, ScriptFailedError):
        if error.traceback_tail:
            sys.stderr.write(f"\n{error.traceback_tail.rstrip()}\n")
        if error.log_path:
            sys.stderr.write(f"\nFull log: {error.log_path}\n")


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command; exit with 0 (found), 2 (usage), 3 (nothing runs), 4 (script error), 5 (storage) or 130."""
    if argv is None:
        hide_password()
    arguments = sys.argv[1:] if argv is None else argv

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        code = app(args=spread_numbers(arguments, "--zero-stages"), standalone_mode=False)
    except DsatError as error:
        _report(error)
        sys.exit(error.exit_code)
    except TyperException as error:
        context = getattr(error, "ctx", None)  # usage errors have one
        remedy = "" if context is None else f" See {context.command_path} --help."
        if error.format_message():  # empty where the help was shown instead
            sys.stderr.write(f"optuna-dsat: {error.format_message().rstrip('.')}.{remedy}\n")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code or 0)
