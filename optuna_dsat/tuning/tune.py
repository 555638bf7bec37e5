"""``optuna_dsat.tune``: the search as a function, with every option of the command as a keyword."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from optuna_dsat.errors import NothingRunnableError, ScriptFailedError
from optuna_dsat.escape.terminal import say
from optuna_dsat.tuning.given import Given
from optuna_dsat.tuning.given_config import with_config_file, write_config
from optuna_dsat.tuning.keywords import with_keywords
from optuna_dsat.tuning.options import AutotuningOptions
from optuna_dsat.tuning.prepare import Prepared, prepare_each
from optuna_dsat.tuning.result import TuneResult

if TYPE_CHECKING:
    from optuna_dsat.tuning.run import StudyRun

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
        TypeError: If an argument is of a type that it does not take, or unknown; nothing was launched or written.
        UsageError: If something given cannot be used; nothing was launched or written.
        NothingRunnableError: If no configuration could be measured on this hardware.
        ScriptFailedError: If the script fails whatever the configuration, or the training at the end does.
        StorageError: If the database failed while the study ran; calling again continues it.
        SearchInterrupted: A ``KeyboardInterrupt`` that carries what was found until then; calling again continues.
    """
    given = with_config_file(given)
    studies = prepare_each(None, given)
    options = studies[0].given.options

    from optuna_dsat.tuning.gpu_counts import best_of, search_each
    from optuna_dsat.tuning.run import train_with_best

    def notice(text: str) -> None:
        if not options.quiet:
            say(text, file=sys.stderr)

    for one in studies:
        for note in one.notes:
            notice(note)
    write_config(options)
    if len(studies) == 1:
        ended = _search(studies[0])
        assert ended.result is not None
        found = ended.result
    else:
        ended, found = best_of(list(search_each(studies, _search, on_notice=notice)))
    result = TuneResult.of(found)
    if options.run_full_experiment and (code := train_with_best(ended, result)):
        raise ScriptFailedError(f"Training with {result.config_path} ended with exit code {code}.")
    return result


def _search(prepared: Prepared) -> StudyRun:
    """Run one study and return how it ended, which is with a result.

    Raises:
        DsatError: As ``tune``.
        SearchInterrupted: As ``tune``.
    """
    from optuna_dsat.display.live import make_observer
    from optuna_dsat.display.stopping import Stopping
    from optuna_dsat.tuning.run import run_study

    study = prepared.request.spec.name
    with make_observer(quiet=prepared.given.options.quiet, stopping=Stopping()) as observer:
        ended = run_study(prepared.request, observer=observer)
    if ended.interrupted:
        raise SearchInterrupted(None if ended.result is None else TuneResult.of(ended.result), study=study)
    if ended.result is None:
        raise NothingRunnableError(f"The study {study!r} has measured nothing yet.")
    return ended
