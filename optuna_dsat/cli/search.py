"""``random``, ``binary``, ``asha``, ``guided``, ``tune`` and ``run``: check options, search, show the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_dsat.cli.parsing.commands import origins_of
from optuna_dsat.cli.tables import notify
from optuna_dsat.display.stopping import EXIT_INTERRUPTED
from optuna_dsat.errors import StorageError, StudyDeletedError, exit_code_of
from optuna_dsat.escape.terminal import say
from optuna_dsat.study.options.declaration import STORAGE_ENV, of_output, options_in, stored_command
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import (
    AshaOptions,
    AutotuningOptions,
    BinaryOptions,
    GuidedOptions,
    RandomOptions,
    TuneOptions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optuna_dsat.study.result import StudyResult
    from optuna_dsat.study.spec import StudyRequest
    from optuna_dsat.tuning.prepare import Prepared
    from optuna_dsat.tuning.run import StudyRun


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options of a search that exist only on the command line."""

    dry_run: Annotated[bool, of_output(help="Show the space and the profile launch; launch nothing.", first=True)] = (
        False
    )
    json_output: Annotated[bool, of_output(help="Print the result as JSON.", flags=("--json",))] = False
    on_end: Annotated[
        str | None,
        of_output(
            help="Run this shell command once after the search, also after an interrupted or failed one. It gets "
            "OPTUNA_DSAT_STUDY, OPTUNA_DSAT_RESULT (best_ds_metrics.json; empty without a result), "
            "OPTUNA_DSAT_EXIT_CODE and OPTUNA_DSAT_STORAGE.",
            metavar="COMMAND",
        ),
    ] = None
    price: Annotated[
        float | None, of_output(help="Price of a GPU hour; the result then gives the cost of the search.", least=0.0)
    ] = None


def _search(method: str | None, context: typer.Context, options: TuneOptions, output: OutputOptions) -> None:
    origins = origins_of(context, (field_.name for kind in (options, output) for field_ in fields(kind)))
    run(method, Given(options=options, origins=origins), output)


def random_search(context: typer.Context, options: RandomOptions, output: OutputOptions) -> None:
    """Method random: draw random configs and prune those that cannot win."""
    _search("random", context, options, output)


def binary_search(context: typer.Context, options: BinaryOptions, output: OutputOptions) -> None:
    """Method binary: bisect the micro-batch of random configs."""
    _search("binary", context, options, output)


def asha_search(context: typer.Context, options: AshaOptions, output: OutputOptions) -> None:
    """Method asha: bisect the micro-batch of random configs, with more launches for the best (successive halving)."""
    _search("asha", context, options, output)


def guided_search(context: typer.Context, options: GuidedOptions, output: OutputOptions) -> None:
    """Method guided: fit models of memory and step time to all measurements; run the most promising config next."""
    _search("guided", context, options, output)


def tune_search(context: typer.Context, options: AutotuningOptions, output: OutputOptions) -> None:
    """Find the fastest config for your script. An autotuning section in its config is followed as DeepSpeed does."""
    _search(None, context, options, output)


def run_search(context: typer.Context, options: AutotuningOptions, output: OutputOptions) -> None:
    """Tune, then train with the best config."""
    _search(None, context, replace(options, run_full_experiment=True), output)


def run(method: str | None, given: Given, output: OutputOptions) -> None:
    """Run a search with the given options; print the result. The options or the config select a missing method.

    Raises:
        DsatError: With the exit code of the command.
    """
    from optuna_dsat.tuning.prepare import check_storage, prepare_each
    from optuna_dsat.tuning.run import search_at_ranks

    studies, previews = prepare_each(method, given), []
    for prepared in studies:
        for note in prepared.notes:
            notify(note)
        if output.dry_run:
            check_storage(prepared.request)
            previews.append(_preview(prepared, output))
    if output.dry_run:
        if output.json_output:
            print(json.dumps({"searches": previews}, indent=2))
        return
    for line in _files_of(given):
        notify(line)
    options = studies[0].given.options
    with on_end_of(studies[0].request, output.on_end) as end:
        if len(studies) > 1:
            ended, end.result = _run_each(studies, output)
        else:
            ended = search_at_ranks(
                studies[0],
                lambda prepared: run_request(
                    prepared.request, end=end, quiet=options.quiet, as_json=output.json_output, price=output.price
                ),
                on_notice=notify,
            )
    if options.run_full_experiment and ended.result is not None:
        from optuna_dsat.tuning.run import train_with_best

        sys.exit(train_with_best(ended, ended.result, stdout=sys.stderr if output.json_output else None))


def _preview(prepared: Prepared, output: OutputOptions) -> dict[str, Any]:
    """Return the preview of a search with its options as plain values, and print it unless JSON is wanted."""
    from optuna_dsat.cli.show import options_given, show_options, show_preview
    from optuna_dsat.tuning.run import preview

    space, values = preview(prepared.request.spec)
    options = options_given(prepared.given, output)
    if not output.json_output:
        show_preview(prepared.request.spec, space, values)
        show_options(options)
    return {**values, "options": options}


def _files_of(given: Given) -> list[str]:
    """Return a line with the file from which options were read, and their names; empty without a file."""
    declared = options_in(OutputOptions) | options_in(type(given.options))
    files: dict[str, list[str]] = {}
    for name, origin in given.origins.items():
        if Path(origin).is_file():
            files.setdefault(origin, []).append(declared[name].spelled(name))
    return [f"Options from {file}: {', '.join(names)}." for file, names in files.items()]


def _run_each(studies: Sequence[Prepared], output: OutputOptions) -> tuple[StudyRun, StudyResult]:
    """Search at each number of GPUs and show all results; return the best run and its result."""
    from optuna_dsat.cli.show import show_by_gpus
    from optuna_dsat.store import display_url
    from optuna_dsat.tuning.run import best_of, search_each

    options, as_json = studies[0].given.options, output.json_output
    searches = search_each(
        studies,
        lambda prepared: run_request(
            prepared.request, quiet=options.quiet, as_json=as_json, price=output.price, show=not as_json
        ),
        on_notice=notify,
    )
    rows = []
    try:
        for search in searches:
            rows.append(search)
    except KeyboardInterrupt:
        left = [study.request.spec.name for study in studies[len(rows) :]]
        notify(f"Of this sweep {', '.join(left)} are left: type the same command again.")
        raise
    best, result = best_of(rows)
    show_by_gpus(rows, best=result, as_json=as_json)
    measured = [row.study for row in rows if row.result is not None]
    if len(measured) > 1 and not as_json:
        command = stored_command("report", *measured, storage=display_url(studies[0].request.storage))
        say(f"Side by side: {command}")
    return best, result


def run_request(
    request: StudyRequest,
    *,
    end: SearchEnd | None = None,
    quiet: bool,
    as_json: bool,
    price: float | None = None,
    show: bool = True,
) -> StudyRun:
    """Tune, show the result with the cost at a price per GPU hour, and return the outcome, whose result ``end`` gets.

    Raises:
        StorageError: If the database failed; the message ends with the command that continues the study.
        KeyboardInterrupt: If the search was interrupted, after the result so far and the command that continues it are
            shown.
    """
    from optuna_dsat.cli.show import show_result
    from optuna_dsat.display.live import make_observer
    from optuna_dsat.display.stopping import stopping_on_signals
    from optuna_dsat.store import display_url
    from optuna_dsat.tuning.run import run_study

    with stopping_on_signals() as stopping, make_observer(quiet=quiet, stopping=stopping) as observer:
        stopping.remedy = stored_command("resume", request.spec.name, storage=display_url(request.storage))
        try:
            ended = run_study(request, observer=observer)
        except StudyDeletedError:
            raise
        except StorageError as error:
            raise StorageError(f"{error} Continue with: {stopping.remedy}") from error
    result = ended.result
    if end is not None:
        end.result = result
    try:
        if result is not None and show:
            show_result(result, as_json=as_json, price=price, request=request)
    finally:  # Ctrl-C may have ended the reader of stdout, too
        if ended.interrupted and ended.storage:
            say(f"Interrupted. Continue with: {stopping.remedy}", file=sys.stderr)
    if ended.interrupted:
        raise KeyboardInterrupt
    if not request.conclude and not quiet:
        show_it = stored_command("show", request.spec.name, storage=display_url(request.storage))
        notify(
            "Nothing is left for this worker. The process that started the study measures its finalists again; if it "
            f"is gone, `{stopping.remedy}` does. `{show_it}` shows the study."
        )
    return ended


@dataclass
class SearchEnd:
    """Outcome of a search, for ``--on-end``."""

    result: StudyResult | None = None


@contextmanager
def on_end_of(request: StudyRequest, command: str | None) -> Iterator[SearchEnd]:
    """Run a command after the block, which sets the result. Its output goes to stderr; its failure is a warning."""
    end, code = SearchEnd(), 0
    try:
        yield end
    except BaseException as error:  # the exit code is that of ``cli.main``
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else exit_code_of(error)
        raise
    finally:
        if command is not None:
            result = end.result
            variables = {
                "OPTUNA_DSAT_STUDY": request.spec.name if result is None else result.study,
                "OPTUNA_DSAT_RESULT": "" if result is None else result.metrics_path,
                "OPTUNA_DSAT_EXIT_CODE": str(code),
                STORAGE_ENV: request.storage,
            }
            _run_command(command, variables)


def _run_command(command: str, variables: dict[str, str]) -> None:
    sys.stdout.flush()
    environ = {**os.environ, **variables}
    try:
        ended = subprocess.run(
            command, shell=True, env=environ, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False
        )
    except OSError as error:
        notify(f"Warning: the command of --on-end could not be started: {error.strerror}.")
        return
    if ended.returncode:
        notify(f"Warning: the command of --on-end ended with exit code {ended.returncode}.")
