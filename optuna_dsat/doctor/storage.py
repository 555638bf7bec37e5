"""Check whether a study's storage can be opened, without creating or changing anything."""

from __future__ import annotations

from optuna_dsat.doctor.finding import Finding, Status
from optuna_dsat.errors import DsatError
from optuna_dsat.store import database_exists, display_url

__all__ = ["examine"]

_RETRY_LIMIT_S = 5.0
"""Longest time to retry connecting to the database, in seconds."""


def examine(url: str) -> Finding:
    """Return the finding for a storage URL; the URL's password is masked."""
    from optuna_dsat.store import migrate
    from optuna_dsat.store.database import Database

    shown = display_url(url)
    data = {"url": shown}
    try:
        if not database_exists(url):
            return Finding(
                area="database",
                name="storage",
                status=Status.FINE,
                text=f"{shown} is not there yet; the first study makes it.",
                data=data,
            )
        database = Database(url, create=False, retry_limit_s=_RETRY_LIMIT_S)
        try:
            state = migrate.require_usable(database)
        finally:
            database.close()
    except DsatError as error:
        return Finding(
            area="database",
            name="storage",
            status=Status.FATAL,
            text=str(error),
            remedy="Start the database, or correct the URL, its user or password (they may also come from the "
            "environment: PGPASSWORD, PGPASSFILE).",
            data=data,
        )
    words = "it holds no study yet" if state is migrate.SchemaState.NEW else "its tables are those of this version"
    return Finding(area="database", name="storage", status=Status.FINE, text=f"{shown} answers; {words}.", data=data)
