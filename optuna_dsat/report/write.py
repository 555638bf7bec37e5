"""Writes the report of a study to a file."""

from __future__ import annotations

from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.report.page import render
from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.runtime.atomic_write import write_text_atomic
from optuna_dsat.store import Store

__all__ = ["default_path", "write_report"]


def default_path(view: StudyView) -> Path:
    """Return the default path: among the study's files if they are on this machine, else in the working directory."""
    return Path(f"{view.spec.name}-report.html") if view.folder is None else view.folder / "report.html"


def write_report(store: Store, name: str, path: Path | None = None) -> Path:
    """Write the report of a study as it is now; return the file. An existing one is replaced atomically.

    Args:
        store: Where the study lives.
        name: The study.
        path: The HTML file; None for ``default_path``.

    Raises:
        UsageError: If there is no such study, the file cannot be written, or plotly is not installed.
        StorageError: If the database fails for longer than the store's retry limit.
    """
    view = read_view(store, name)
    target = default_path(view) if path is None else path
    text = render(view)
    try:
        write_text_atomic(target, text)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}. Choose another file with -o.") from None
    return target
