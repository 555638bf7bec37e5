"""What lies in the database, the folder and the machine; read past the package, from the tables themselves."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from optuna_dsat.trials.attributes import CONFIG_KEY, OUTCOME, SIMPLIFIES
from tests.crash_points.launcher import Launched

_PATIENCE_S = 20.0
"""How long the server may take to end connections whose client is gone."""


@dataclass(frozen=True, kw_only=True)
class StoredTrial:
    """A trial as its rows say."""

    number: int
    state: str
    value: float | None
    outcome: str
    """Empty where none is stored."""
    key: str
    """Canonical key of its configuration; empty where none is stored."""
    simplifies: bool = False
    """Whether it repeats the best one without settings that may have no effect, beyond the budget."""

    @property
    def finished(self) -> bool:
        return self.state in ("COMPLETE", "PRUNED", "FAIL")

    @property
    def launched(self) -> bool:
        """Whether it was launched to its end."""
        return self.finished and self.outcome not in ("", "lost")


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A database with one study."""

    trials: tuple[StoredTrial, ...] = ()
    claims: tuple[int, ...] = ()
    """Numbers of the trials that hold a claim."""
    heartbeats: tuple[int, ...] = ()
    """Numbers of the trials and tasks that have a sign of life."""
    launches: tuple[str, ...] = ()
    """Names of the launches that are recorded."""
    studies: tuple[str, ...] = ()
    """Names of Optuna's studies; of those of ours where they are whole."""
    connections: int = 0
    """Connections of others to the database."""
    locked: bool = False
    """Whether anyone holds the lock of the database."""


def observe(url: str) -> Observed:
    """Return what a database holds; nothing where it does not exist."""
    parsed = make_url(url)
    sqlite = parsed.get_backend_name() == "sqlite"
    if sqlite and not Path(str(parsed.database)).exists():
        return Observed()
    engine = create_engine(parsed, poolclass=NullPool)
    with engine.connect() as connection:
        tables = set(inspect(connection).get_table_names())
        result = {} if not {"trials", "dsat_studies"} <= tables else _rows(connection)
        locks = {"locked": _file_is_locked(Path(f"{parsed.database}-lock"))} if sqlite else _postgres_locks(connection)
    return Observed(**result, **locks)


def _rows(connection: Connection) -> dict[str, Any]:
    def rows(query: str) -> Sequence[Any]:
        return connection.execute(text(query)).all()

    values = {row[0]: row[1] for row in rows("SELECT trial_id, value FROM trial_values")}
    attributes: dict[int, dict[str, Any]] = {}
    keys = ", ".join(f"'{key}'" for key in (OUTCOME, CONFIG_KEY, SIMPLIFIES))
    for trial_id, key, value in rows(
        f"SELECT trial_id, key, value_json FROM trial_user_attributes WHERE key IN ({keys})"
    ):
        attributes.setdefault(trial_id, {})[key] = json.loads(value)
    return {
        "trials": tuple(
            StoredTrial(
                number=number,
                state=str(state),
                value=values.get(trial_id),
                outcome=attributes.get(trial_id, {}).get(OUTCOME, ""),
                key=attributes.get(trial_id, {}).get(CONFIG_KEY, ""),
                simplifies=SIMPLIFIES in attributes.get(trial_id, {}),
            )
            for trial_id, number, state in rows("SELECT trial_id, number, state FROM trials ORDER BY number")
        ),
        "claims": tuple(row[0] for row in rows("SELECT trial_number FROM dsat_claims ORDER BY 1")),
        "heartbeats": tuple(row[0] for row in rows("SELECT trial_number FROM dsat_heartbeats ORDER BY 1")),
        "launches": tuple(row[0] for row in rows("SELECT launch_id FROM dsat_launches ORDER BY 1")),
        "studies": tuple(row[0] for row in rows("SELECT study_name FROM studies ORDER BY 1")),
    }


def _postgres_locks(connection: Connection) -> dict[str, Any]:
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    advisory = (
        "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
        "WHERE l.locktype = 'advisory' AND d.datname = current_database()"
    )
    until = time.monotonic() + _PATIENCE_S
    while (left := int(connection.execute(text(others)).scalar_one())) and time.monotonic() < until:
        time.sleep(0.05)  # the server ends its side of a connection when it gets to it
        connection.execute(text("SELECT pg_stat_clear_snapshot()"))
    return {
        "connections": left,
        "locked": bool(connection.execute(text(advisory)).scalar_one()),
    }


def _file_is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


_DIGEST = re.compile(r"[0-9a-f]{32,}")
"""Part of a name that differs from run to run: a digest of the database's URL, or a random one."""


def files_of(folder: Path) -> frozenset[str]:
    """Return the files and empty folders below a folder, by their relative paths, without digests."""
    result: set[str] = set()
    for place, folders, files in os.walk(folder):
        inside = Path(place).relative_to(folder)
        result.update(str(inside / name) for name in files)
        result.update(f"{inside / name}/" for name in folders if not any(Path(place, name).iterdir()))
    return frozenset(_DIGEST.sub("DIGEST", name) for name in result)


def launches_of(notes: Path) -> tuple[Launched, ...]:
    """Return the starts and ends of launches, in order."""
    if not notes.exists():
        return ()
    return tuple(Launched(**json.loads(line)) for line in notes.read_text(encoding="utf-8").splitlines())


def living_children() -> tuple[str, ...]:
    """Return the living processes below this one; zombies are dead, and are waited for."""
    left = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
            elif child.name() != "postgres":
                left.append(f"{child.pid} {child.name()}")
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return tuple(left)
