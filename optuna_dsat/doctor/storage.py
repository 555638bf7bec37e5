"""Whether a study's storage can be reached and used. Nothing is created or changed."""

from __future__ import annotations

from optuna_dsat.doctor.finding import Finding, Status
from optuna_dsat.errors import DsatError
from optuna_dsat.store import database_exists, display_url

__all__ = ["examine"]

_PATIENCE_S = 5.0
"""How long a database that is away is waited for."""


def examine(url: str) -> Finding:
    """Return what is to be said of a storage; its password is never shown."""
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
        database = Database(url, create=False, retry_limit_s=_PATIENCE_S)
        try:
            migrate.require_usable(database)
            state = migrate.check(database)
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
