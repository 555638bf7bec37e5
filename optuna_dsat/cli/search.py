"""``random``, ``binary``, ``asha``, ``guided``, ``tune`` and ``run``: check what was given, tune, show the result."""

from __future__ import annotations

import shlex
import sys

from optuna_dsat.cli.origins import show_options
from optuna_dsat.cli.show import show_plan, show_result
from optuna_dsat.display.live import make_observer
from optuna_dsat.display.stopping import stopping_on_signals
from optuna_dsat.launch.devices import Devices
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.tuning.options import TuneOptions
from optuna_dsat.tuning.prepare import check_storage, prepare

__all__ = ["run", "run_spec"]


def run(method: str | None, options: TuneOptions) -> None:
    """Tune as the options say; print the result.

    Args:
        method: Search method; None for the one that the options name.
        options: The options.

    Raises:
        DsatError: With the exit code that the command leaves with.
    """
    prepared = prepare(method, options)
    options, spec = prepared.options, prepared.spec
    for note in prepared.notes:
        sys.stderr.write(f"{note}\n")
    if options.dry_run:
        check_storage(spec, options.storage)
        show_plan(spec)
        show_options(options)
        return
    run_spec(
        spec,
        prepared.devices,
        storage=options.storage,
        quiet=options.quiet,
        as_json=options.json_output,
        run_full=options.run_full_experiment,
        reuse_profile=options.profile_reuse,
        check_loss=options.check_loss,
    )


def run_spec(
    spec: StudySpec,
    devices: Devices,
    *,
    storage: str,
    quiet: bool,
    as_json: bool,
    run_full: bool = False,
    reuse_profile: bool = True,
    conclude: bool = True,
    relocated: bool = False,
    check_loss: bool = False,
) -> None:
    """Tune, show the result, and train with it where asked for.

    Raises:
        KeyboardInterrupt: If the search was interrupted; what was found so far, and how to go on, is shown before.
    """
    from optuna_dsat.store import display_url
    from optuna_dsat.tuning.run import run_study, train_with_best

    with stopping_on_signals() as stopping, make_observer(quiet=quiet, stopping=stopping) as observer:
        stopping.remedy = _resume_command(spec, storage, display_url(storage))
        ended = run_study(
            spec,
            devices,
            storage=storage,
            observer=observer,
            reuse_profile=reuse_profile,
            conclude=conclude,
            relocated=relocated,
            check_loss=check_loss,
        )
    result = ended.result
    if result is not None:
        show_result(result, as_json=as_json)
    if ended.interrupted:
        if ended.storage:
            sys.stderr.write(f"Interrupted. Continue with: {_resume_command(spec, storage, ended.storage)}\n")
        raise KeyboardInterrupt
    if not conclude and not quiet:
        sys.stderr.write(f"Nothing is left for this worker; `optuna-dsat show {spec.name}` shows the study.\n")
    if run_full and result is not None:
        sys.exit(train_with_best(ended, result, stdout=sys.stderr if as_json else None))


def _resume_command(spec: StudySpec, storage: str, shown_url: str) -> str:
    """Return the command that continues a study; a URL's password is not shown."""
    command = ["optuna-dsat", "resume", spec.name]
    if storage != TuneOptions.storage:
        command += ["--storage", shown_url]
    return shlex.join(command)
