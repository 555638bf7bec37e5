"""``random``, ``binary``, ``asha``, ``guided``, ``tune`` and ``run``: check what was given, tune, show the result."""

from __future__ import annotations

import shlex
import sys

from optuna_dsat.cli.origins import show_options
from optuna_dsat.cli.show import show_plan, show_result
from optuna_dsat.display.live import make_observer
from optuna_dsat.display.stopping import stopping_on_signals
from optuna_dsat.study.request import StudyRequest
from optuna_dsat.tuning.options import TuneOptions
from optuna_dsat.tuning.prepare import check_storage, prepare

__all__ = ["run", "run_request"]


def run(method: str | None, options: TuneOptions) -> None:
    """Tune as the options say; print the result.

    Args:
        method: Search method; None for the one that the options name.
        options: The options.

    Raises:
        DsatError: With the exit code that the command leaves with.
    """
    prepared = prepare(method, options)
    options, request = prepared.options, prepared.request
    for note in prepared.notes:
        sys.stderr.write(f"{note}\n")
    if options.dry_run:
        check_storage(request)
        show_plan(request.spec)
        show_options(options)
        return
    run_request(request, quiet=options.quiet, as_json=options.json_output, run_full=options.run_full_experiment)


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
    if request.storage != TuneOptions.storage:
        command += ["--storage", shown_url]
    return shlex.join(command)
