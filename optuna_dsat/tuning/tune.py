"""``optuna_dsat.tune``: the search as a function, with every option of the command as a keyword."""

from __future__ import annotations

import sys

from optuna_dsat.errors import NothingRunnableError, ScriptFailedError
from optuna_dsat.study.result import TuneResult
from optuna_dsat.tuning.given import Given
from optuna_dsat.tuning.keywords import with_keywords
from optuna_dsat.tuning.options import AutotuningOptions
from optuna_dsat.tuning.prepare import prepare

__all__ = ["SearchInterrupted", "TuneResult", "tune"]


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C ended ``optuna_dsat.tune``. The study is stored: calling again with the same arguments continues it.

    Attributes:
        result: What was found until then, not confirmed; None if nothing was measured.
        study: Name of the study.
    """

    def __init__(self, result: TuneResult | None, *, study: str) -> None:
        super().__init__(f"The search of study {study!r} was interrupted; call again to continue it.")
        self.result = result
        self.study = study


@with_keywords(AutotuningOptions)
def tune(given: Given) -> TuneResult:
    """Find the DeepSpeed configuration that trains a script fastest; the command ``optuna-dsat tune`` as a function.

    The script runs in processes of its own, some steps at a time, and is not imported. An existing study of the same
    name is continued. The environment and option files are not read; the config's ``autotuning`` section is, for
    arguments that are not given. None stands for an argument's default.

    Args:
        given: {options}

    Returns:
        The best configuration with its metrics, and where all of it lies.

    Raises:
        UsageError: If something given cannot be used; nothing was launched or written. The message calls arguments by
            their names on the command line.
        NothingRunnableError: If no configuration could be measured on this hardware.
        ScriptFailedError: If the script fails whatever the configuration, or the training at the end does.
        StorageError: If the database failed while the study ran; calling again continues it.
        SearchInterrupted: A ``KeyboardInterrupt`` that carries what was found until then; calling again continues.
    """
    prepared = prepare(None, given)
    options, study = prepared.given.options, prepared.request.spec.name

    from optuna_dsat.display.live import make_observer
    from optuna_dsat.display.stopping import Stopping
    from optuna_dsat.tuning.run import run_study, train_with_best

    if not options.quiet:
        sys.stderr.writelines(f"{note}\n" for note in prepared.notes)
    with make_observer(quiet=options.quiet, stopping=Stopping()) as observer:
        ended = run_study(prepared.request, observer=observer)
    if ended.interrupted:
        raise SearchInterrupted(ended.result, study=study)
    if ended.result is None:
        raise NothingRunnableError(f"The study {study!r} has measured nothing yet.")
    if options.run_full_experiment and (code := train_with_best(ended, ended.result)):
        raise ScriptFailedError(f"Training with {ended.result.config_path} ended with exit code {code}.")
    return ended.result
