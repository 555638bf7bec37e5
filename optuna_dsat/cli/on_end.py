"""``--on-end``: a command of the user that runs once after a search."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optuna_dsat.cli.tables import notify
from optuna_dsat.display.stopping import EXIT_INTERRUPTED
from optuna_dsat.errors import DsatError
from optuna_dsat.study.options.declaration import STORAGE_ENV

if TYPE_CHECKING:
    from optuna_dsat.study.result import StudyResult
    from optuna_dsat.study.spec import StudyRequest

HELP = (
    "Run this shell command once after the search, also after an interrupted or failed one. It gets OPTUNA_DSAT_STUDY, "
    "OPTUNA_DSAT_RESULT (best_ds_metrics.json; empty without a result), OPTUNA_DSAT_EXIT_CODE and OPTUNA_DSAT_STORAGE."
)


@dataclass(kw_only=True)
class SearchEnd:
    """Outcome of a search, for ``--on-end``."""

    study: str
    storage: str
    result: StudyResult | None = None

    def variables(self, exit_code: int) -> dict[str, str]:
        """Return the variables of the environment that the command gets."""
        return {
            "OPTUNA_DSAT_STUDY": self.study if self.result is None else self.result.study,
            "OPTUNA_DSAT_RESULT": "" if self.result is None else self.result.metrics_path,
            "OPTUNA_DSAT_EXIT_CODE": str(exit_code),
            STORAGE_ENV: self.storage,
        }


@contextmanager
def on_end_of(request: StudyRequest, command: str | None) -> Iterator[SearchEnd]:
    """Run a command after the block, which sets the result. Its output goes to stderr; its failure is a warning."""
    end = SearchEnd(study=request.spec.name, storage=request.storage)
    try:
        yield end
    except BaseException as error:
        _run(command, end.variables(_exit_code(error)))
        raise
    _run(command, end.variables(0))


def _exit_code(error: BaseException) -> int:
    """Return the exit code of the command for an error that ends it, as ``cli.main`` does."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, DsatError) else 1


def _run(command: str | None, variables: dict[str, str]) -> None:
    if command is None:
        return
    sys.stdout.flush()
    try:
        ended = subprocess.run(
            command,
            shell=True,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            check=False,
        )
    except OSError as error:
        notify(f"Warning: the command of --on-end could not be started: {error.strerror}.")
        return
    if ended.returncode:
        notify(f"Warning: the command of --on-end ended with exit code {ended.returncode}.")
