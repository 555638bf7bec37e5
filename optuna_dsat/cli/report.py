"""The command that writes the report of a study, or compares several studies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_dsat.cli.parsing.parameters import (
    DEFAULT_STORAGE,
    Storage,
    complete_studies,
    confirm_replacing,
    option,
    say_written,
)
from optuna_dsat.errors import UsageError

if TYPE_CHECKING:
    from optuna_dsat.report.view import StudyView

_ELSEWHERE = re.compile(r"(?P<name>[^/]+)@(?P<url>[a-z][\w+]*://.*)", re.DOTALL)
"""A study in another database. Study names contain no slash."""


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STUDY]...",
            help="Name of the study; several are shown side by side. NAME@URL is one of another database.  "
            "\\[default: the latest study]",
            show_default=False,
            autocompletion=complete_studies,
        ),
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    output: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            help="HTML file to write.  \\[default: report.html among the study's files, else STUDY-report.html here; "
            "comparison.html here for several]",
        ),
    ] = None,
    dataset_size: Annotated[
        int | None, option(help="Samples of the training data, for what a training takes.", min=1)
    ] = None,
    epochs: Annotated[float, typer.Option(help="Epochs of the training that is to follow.", min=0.001)] = 1.0,
    price: Annotated[float | None, option(help="Price of a GPU hour, for what a training saves.", min=0.0)] = None,
) -> None:
    """Write a study's report: one HTML file with figures that opens in any browser, without a network.

    Several studies are shown side by side: models, machines, methods, before and after an upgrade.
    """
    from optuna_dsat.report.training import Training
    from optuna_dsat.report.view import read_view
    from optuna_dsat.report.write import COMPARISON, default_path, is_report, write_comparison, write_report
    from optuna_dsat.store import Store
    from optuna_dsat.study.stored import latest_study

    training = Training(epochs=epochs, price_per_gpu_hour=price, dataset_size=dataset_size)
    if names and len(names) > 1:
        confirm_replacing(output or Path(COMPARISON), is_ours=is_report)
        say_written(write_comparison([_read(name, storage) for name in names], output, training=training))
        return
    name, url = _parts(names[0], storage) if names else (None, storage)
    with Store.open(url, create=False) as store:
        name = name or latest_study(store)
        confirm_replacing(output or default_path(read_view(store, name)), is_ours=is_report)
        say_written(write_report(store, name, output, training=training))


def _read(name: str, storage: str) -> StudyView:
    from optuna_dsat.report.view import read_view
    from optuna_dsat.store import Store

    own, url = _parts(name, storage)
    with Store.open(url, create=False) as store:
        return read_view(store, own)


def _parts(name: str, storage: str) -> tuple[str, str]:
    """Return a study's name and its database."""
    from optuna_dsat.store import parse_url

    match = _ELSEWHERE.fullmatch(name)
    if match is None:
        return name, storage
    if parse_url(match["url"]).password:
        raise UsageError(
            f"The address of the database of {match['name']!r} holds a password, which every user of this machine "
            "could read: leave it out and use PGPASSFILE."
        )
    return match["name"], match["url"]
