"""``resume`` and ``worker``: continue a stored study, or join it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_dsat.cli.parsing.commands import again
from optuna_dsat.cli.parsing.parameters import Json, Name, Quiet, Storage, option
from optuna_dsat.cli.search import OutputOptions, on_end_of, run_request
from optuna_dsat.cli.tables import notify
from optuna_dsat.errors import UsageError
from optuna_dsat.escape.terminal import say
from optuna_dsat.study.options.declaration import DEFAULT_STORAGE
from optuna_dsat.tuning.options.tune_options import TuneOptions

if TYPE_CHECKING:
    from optuna_dsat.study.spec import StudyRequest, StudySpec

_MaxTrials = Annotated[int | None, option("--max-trials", help="New number of trials to measure.")]
_MinGain = Annotated[
    float | None,
    option("--min-gain", help="guided: new share by which a launch must be expected to improve the best."),
]
_ConfirmTime = Annotated[
    float | None,
    option("--confirm-time", help="New limit on the time for the rounds of finalists, in seconds."),
]
_WaitForGpus = Annotated[
    float | None,
    option("--wait-for-gpus", help="New limit on the wait for GPUs that other processes use, in seconds."),
]
_Log = Annotated[list[str] | None, again(TuneOptions, "callbacks")]
Workdir = Annotated[
    Path | None, option("--workdir", help="Working directory, if the script is elsewhere on this machine.")
]
Python = Annotated[
    str | None,
    option("--python", help="Python of the script on this machine: an interpreter, or its environment."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run what the database names, although it was not started from this account on this machine: script, "
        "arguments, variables, imports and folders are shown, and asked about on a terminal.",
    ),
]


def resume(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    max_trials: _MaxTrials = None,
    min_gain: _MinGain = None,
    confirm_time: _ConfirmTime = None,
    wait_for_gpus: _WaitForGpus = None,
    workdir: Workdir = None,
    python: Python = None,
    trust: Trust = False,
    log: _Log = None,
    on_end: Annotated[str | None, again(OutputOptions, "on_end")] = None,
    price: Annotated[float | None, again(OutputOptions, "price")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue a study with its own script and settings."""
    limits = {"max_trials": max_trials, "min_gain": min_gain}
    limits |= {"confirm_time": confirm_time, "wait_for_gpus": wait_for_gpus}
    given = {field: limit for field, limit in limits.items() if limit is not None}
    approve = Approval(trust, quiet)
    request = _request(name, storage, given, workdir, python, approve, log, conclude=True)
    with on_end_of(request, on_end) as end:
        run_request(request, end=end, quiet=quiet, as_json=as_json, price=price)


def worker(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    workdir: Workdir = None,
    python: Python = None,
    trust: Trust = False,
    log: _Log = None,
    quiet: Quiet = False,
) -> None:
    """Join a study from another process or machine; the process that started it confirms and exports the winner."""
    request = _request(name, storage, {}, workdir, python, Approval(trust, quiet), log, conclude=False)
    run_request(request, quiet=quiet, as_json=False)


def _request(
    name: str,
    storage: str,
    limits: Mapping[str, float],
    workdir: Path | None,
    python: str | None,
    approve: Approval,
    log: Sequence[str] | None,
    *,
    conclude: bool,
) -> StudyRequest:
    """Return the request that continues a stored study, after its secrets are known."""
    from optuna_dsat.tuning.options.trackers import split_trackers
    from optuna_dsat.tuning.resume import resume_request

    callbacks = split_trackers(log) or ()
    request = resume_request(
        name,
        storage,
        limits=limits,
        workdir=workdir,
        python=python,
        conclude=conclude,
        on_notice=notify,
        approve=approve,
    )
    ask_for_secrets(request.spec)
    return replace(request, callbacks=callbacks)


def _has_terminal() -> bool:
    """Return whether the user can be prompted."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


class Approval:
    """Show what a study would run; prompt unless this user ran exactly that on this machine before."""

    def __init__(self, trust: bool, quiet: bool) -> None:
        self._trust = trust
        self._quiet = quiet

    def __call__(self, lines: Sequence[str], ran_here: bool) -> None:
        """Show the lines, and prompt if necessary; ``UsageError`` if a prompt is not possible, or the answer is no."""
        if ran_here and self._quiet:
            return
        for line in ("The study runs:", *lines):
            say(line, file=sys.stderr)
        if ran_here or self._trust:
            return
        what = "This was not started from this account on this machine"
        if not _has_terminal():
            raise UsageError(f"{what}: look at what the study runs, then give --trust.")
        if not typer.confirm(f"{what}. Run it?", err=True):
            raise UsageError("Nothing was run.")


def ask_for_secrets(spec: StudySpec) -> None:
    """Prompt on a terminal for the study's secrets, which are not stored; without a terminal the run reports them."""
    from optuna_dsat.secrecy.references import keep
    from optuna_dsat.study.trust import missing_secrets

    if not _has_terminal():
        return
    for name, what in missing_secrets(spec).items():
        value = typer.prompt(f"Secret value of {what} (not stored)", hide_input=True, err=True)
        keep({name: str(value)})
