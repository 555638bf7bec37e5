"""The command that writes a study's report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optuna_dsat.cli.parameters import DEFAULT_STORAGE, Name, Storage
from optuna_dsat.escape.terminal import say

__all__ = ["report"]


def report(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="HTML file to write.  \\[default: report.html among the study's files, else STUDY-report.html here]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a study's report: one HTML file with figures that opens in any browser, without a network."""
    from optuna_dsat.report.write import write_report
    from optuna_dsat.store import Store

    with Store.open(storage, create=False) as store:
        say(write_report(store, name, output))
