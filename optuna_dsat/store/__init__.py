"""Everything a study needs, in one database that outlives crashes.

``Store.open`` is the way in. Inside: ``engine`` opens a URL, ``models`` and ``migrate`` are our tables,
``registry``, ``claims``, ``profiles`` and ``history`` read and write them, ``heartbeat`` and ``reclaim``
notice dead workers, ``retry`` and ``resilient`` wait for a database that is away.
"""

from optuna_dsat.store.launches import StoredLaunch
from optuna_dsat.store.profiles import StoredProfile
from optuna_dsat.store.registry import StudyRecord
from optuna_dsat.store.store import Store, load_study
from optuna_dsat.store.urls import database_exists, display_url, parse_url

__all__ = [
    "Store",
    "StoredLaunch",
    "StoredProfile",
    "StudyRecord",
    "database_exists",
    "display_url",
    "load_study",
    "parse_url",
]
