"""Writes reports and comparisons of studies to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.report.compare import render_comparison
from optuna_dsat.report.launch_files import Links
from optuna_dsat.report.page import render
from optuna_dsat.report.training import Training
from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.runtime.files import write_output
from optuna_dsat.store import Store

COMPARISON = "comparison.html"
"""Default name of a comparison, in the working directory."""


def default_path(view: StudyView) -> Path:
    """Return the default path: among the study's files if they are on this machine, else in the working directory."""
    return Path(f"{view.spec.name}-report.html") if view.folder is None else view.folder / "report.html"


def is_report(text: str) -> bool:
    """Return whether a file contains a report or a comparison."""
    return '<meta name="generator" content="optuna-dsat ' in text


def write_report(store: Store, name: str, path: Path | None = None, *, training: Training | None = None) -> Path:
    """Write the report of a study's current state and return the file; replaces an existing file.

    ``path`` is the HTML file; None for ``default_path``.

    Raises:
        UsageError: If the study does not exist, the file cannot be written, or plotly is not installed.
        StorageError: If the database fails for longer than the store's retry limit.
    """
    view = read_view(store, name)
    target = default_path(view) if path is None else path
    return _write(target, render(view, links=Links(view=view, page=target.parent), training=training))


def write_comparison(views: Sequence[StudyView], path: Path | None = None, *, training: Training | None = None) -> Path:
    """Write several studies side by side and return the file; replaces an existing file.

    ``path`` is the HTML file; None for ``COMPARISON`` in the working directory.

    Raises:
        UsageError: If there are fewer than two studies, the file cannot be written, or plotly is not installed.
    """
    return _write(Path(COMPARISON) if path is None else path, render_comparison(views, training=training))


def _write(target: Path, text: str) -> Path:
    try:
        write_output(target, text)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}. Choose another file with -o.") from None
    return target
