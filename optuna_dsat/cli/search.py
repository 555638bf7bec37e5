"""``random``, ``binary``, ``asha``, ``guided``, ``tune`` and ``run``: check options, search, show the result."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_dsat.cli.commands import origins_of, with_options
from optuna_dsat.tuning.declaration import Option
from optuna_dsat.tuning.given import Given
from optuna_dsat.tuning.options import (
    DEFAULT_STORAGE,
    OUTPUT_PANEL,
    AshaOptions,
    AutotuningOptions,
    BinaryOptions,
    GuidedOptions,
    RandomOptions,
    TuneOptions,
)

if TYPE_CHECKING:
    from optuna_dsat.study.request import StudyRequest

__all__ = ["OutputOptions", "add_searches", "run", "run_request"]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options of a search that only a command has."""

    dry_run: Annotated[
        bool,
        Option(help="Show the space, the profile launch and the first configs; launch nothing.", panel=OUTPUT_PANEL),
    ] = False
    json_output: Annotated[bool, Option(help="Print the result as JSON.", flags=("--json",), panel=OUTPUT_PANEL)] = (
        False
    )


def _search(method: str | None, context: typer.Context, options: TuneOptions, output: OutputOptions) -> None:
    origins = origins_of(context, (one.name for one in fields(options)))
    run(method, Given(options=options, origins=origins), output)


def _random(context: typer.Context, options: RandomOptions, output: OutputOptions) -> None:
    """Search random configurations; knowledge of DeepSpeed and the search's history stop those that cannot win."""
    _search("random", context, options, output)


def _binary(context: typer.Context, options: BinaryOptions, output: OutputOptions) -> None:
    """Bisect the micro-batch of randomly drawn configurations."""
    _search("binary", context, options, output)


def _asha(context: typer.Context, options: AshaOptions, output: OutputOptions) -> None:
    """Bisect the micro-batch of random configurations, giving more launches to the best (successive halving)."""
    _search("asha", context, options, output)


def _guided(context: typer.Context, options: GuidedOptions, output: OutputOptions) -> None:
    """Plan every launch: memory and step time are modelled, fitted to what was measured, and the best is run next."""
    _search("guided", context, options, output)


def _tune(context: typer.Context, options: AutotuningOptions, output: OutputOptions) -> None:
    """Search by the autotuning section of your config, as deepspeed --autotuning=tune does."""
    _search(None, context, options, output)


def _run(context: typer.Context, options: AutotuningOptions, output: OutputOptions) -> None:
    """As tune, then train with the best configuration, as deepspeed --autotuning=run does."""
    _search(None, context, replace(options, run_full_experiment=True), output)


def add_searches(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    for name, command in (
        ("random", _random), ("binary", _binary), ("asha", _asha), ("guided", _guided), ("tune", _tune), ("run", _run),
    ):  # fmt: skip
        app.command(name)(with_options(command))


def run(method: str | None, given: Given, output: OutputOptions) -> None:
    """Search as the options say; print the result.

    Args:
        method: Search method; None for the one that the options or the config name.
        given: The options, and where they come from.
        output: What to print.

    Raises:
        DsatError: With the exit code that the command leaves with.
    """
    from optuna_dsat.cli.origins import show_options
    from optuna_dsat.cli.show import show_preview
    from optuna_dsat.tuning.prepare import check_storage, prepare

    prepared = prepare(method, given)
    options, request = prepared.given.options, prepared.request
    for note in prepared.notes:
        sys.stderr.write(f"{note}\n")
    if output.dry_run:
        check_storage(request)
        show_preview(request.spec)
        show_options(prepared.given)
        return
    run_request(request, quiet=options.quiet, as_json=output.json_output, run_full=options.run_full_experiment)


def run_request(request: StudyRequest, *, quiet: bool, as_json: bool, run_full: bool = False) -> None:
    """Tune, show the result, and train with it if asked to.

    Args:
        request: What to tune, where, and how far.
        quiet: Whether to show the result alone.
        as_json: Whether to print the result as JSON.
        run_full: Whether to train with the best config at the end.

    Raises:
        KeyboardInterrupt: If the search was interrupted; what was found so far, and how to go on, is shown before.
    """
    from optuna_dsat.cli.show import show_result
    from optuna_dsat.display.live import make_observer
    from optuna_dsat.display.stopping import stopping_on_signals
    from optuna_dsat.store import display_url
    from optuna_dsat.tuning.run import run_study, train_with_best

    with stopping_on_signals() as stopping, make_observer(quiet=quiet, stopping=stopping) as observer:
        stopping.remedy = _resume_command(request, display_url(request.storage))
        ended = run_study(request, observer=observer)
    result = ended.result
    if result is not None:
        show_result(result, as_json=as_json)
    if ended.interrupted:
        if ended.storage:
            sys.stderr.write(f"Interrupted. Continue with: {_resume_command(request, ended.storage)}\n")
        raise KeyboardInterrupt
    if not request.conclude and not quiet:
        name = request.spec.name
        sys.stderr.write(f"Nothing is left for this worker; `optuna-dsat show {name}` shows the study.\n")
    if run_full and result is not None:
        sys.exit(train_with_best(ended, result, stdout=sys.stderr if as_json else None))


def _resume_command(request: StudyRequest, shown_url: str) -> str:
    """Return the command that continues a study; a URL's password is not shown."""
    command = ["optuna-dsat", "resume", request.spec.name]
    if request.storage != DEFAULT_STORAGE:
        command += ["--storage", shown_url]
    return shlex.join(command)
