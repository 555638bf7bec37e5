"""Persistence of studies in a database (SQLite or PostgreSQL); the entry point is ``Store.open``.

``urls`` parses storage URLs, ``database`` opens them; ``tables`` defines our schema, ``migrate`` checks and upgrades it
and opens Optuna's tables; ``registry`` reads and writes our tables; ``leases`` contains heartbeats and
exclusive tasks; ``reclaim`` requeues the trials of dead workers; ``retry`` retries after transient database errors.
"""

from optuna_dsat.store.leases import Turn, TurnLostError
from optuna_dsat.store.migrate import has_our_tables, refuse_others_database
from optuna_dsat.store.registry import StoredLaunch, StudyRecord
from optuna_dsat.store.store import Store, load_study
from optuna_dsat.store.urls import database_exists, display_url, parse_url

__all__ = [
    "Store",
    "StoredLaunch",
    "StudyRecord",
    "Turn",
    "TurnLostError",
    "database_exists",
    "display_url",
    "has_our_tables",
    "load_study",
    "parse_url",
    "refuse_others_database",
]
