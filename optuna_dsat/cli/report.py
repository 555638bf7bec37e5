"""The command that writes a study's report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.", show_default=False)],
    storage: Annotated[
        str,
        typer.Option("--storage", help="Database of the study: SQLite or PostgreSQL.", envvar="OPTUNA_DSAT_STORAGE"),
    ] = "sqlite:///optuna-dsat.db",
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
        print(write_report(store, name, output))
