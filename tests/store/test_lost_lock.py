"""The lock of a PostgreSQL database, of which the server ends the session: as its restart does, or a cut connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from sqlalchemy import text

from optuna_dsat.store import Store
from optuna_dsat.store.database import Database, LockLostError
from optuna_dsat.study.search.proposals import Proposals
from optuna_dsat.trials import attributes
from tests.harness.landscapes import Hill
from tests.harness.studies import StudyBench

pytestmark = pytest.mark.postgres

_HOLDERS = """
SELECT DISTINCT pid FROM pg_locks
WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def cut_locks(database: Database, *, but: int = 0) -> None:
    """End the sessions that hold locks of the database, whosever they are, and wait until their locks are released."""
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        cut = f"SELECT pg_terminate_backend(pid, 60000) FROM ({_HOLDERS}) holders WHERE pid <> {but}"
        ended = connection.execute(text(cut)).scalars().all()
    assert ended
    assert all(ended)


@pytest.fixture
def mine(ready_postgres_url: str) -> Iterator[Database]:
    database = Database(ready_postgres_url)
    yield database
    database.close()


@pytest.fixture
def others(ready_postgres_url: str) -> Iterator[Database]:
    database = Database(ready_postgres_url)
    yield database
    database.close()


def noted(database: Database) -> list[int]:
    return database.run(lambda session: list(session.scalars(text("SELECT number FROM noted ORDER BY number"))))


def note(database: Database, number: int) -> None:
    database.run(lambda session: session.execute(text(f"INSERT INTO noted VALUES ({number})")))


def test_no_transaction_passes_without_the_lock_and_the_work_is_done_again(mine: Database, others: Database) -> None:
    others.run(lambda session: session.execute(text("CREATE TABLE noted (number INTEGER)")))
    seen: list[list[int]] = []

    def work() -> None:
        seen.append(noted(mine))
        if len(seen) == 1:
            cut_locks(others)
            with others.exclusive("write between look and write"):
                note(others, 7)
        note(mine, len(seen))

    mine.exclusively("look and write", work)
    assert seen == [[], [7]]
    assert noted(mine) == [2, 7]
    with mine.exclusive("look"):
        cut_locks(others)
        with pytest.raises(LockLostError, match="needed to look"):
            note(mine, 3)
    assert noted(mine) == [2, 7]


def test_who_gets_a_lock_that_was_lost_waits_for_the_transaction_of_who_had_it(
    mine: Database, others: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optuna_dsat.store.database.LOCK_TIMEOUT_S", 0.3)
    with mine.exclusive("write"), mine.engine.begin() as connection:
        holder = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        cut_locks(others, but=holder)
        with pytest.raises(Exception, match=r"held the lock of the database for more than 0\.3 s"):
            others.exclusively("write", lambda: None)
    others.exclusively("write", lambda: None)


def test_a_budget_is_kept_where_the_lock_is_lost_between_the_count_and_the_ask(
    ready_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    within_budget, counts = Proposals._within_budget, list[bool]()
    with Store.open(ready_postgres_url) as store, Store.open(ready_postgres_url) as other:

        def counted(proposals: Proposals) -> bool:
            counts.append(within_budget(proposals))
            if len(counts) == 3:
                cut_locks(other._database)
                study = optuna.load_study(study_name="s", storage=other.storage)
                trial = other._database.exclusively("ask", study.ask)
                trial.set_user_attr(attributes.LAUNCH_ID, "of another worker")
                trial.set_user_attr(attributes.OUTCOME, "script_error")
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return counts[-1]

        monkeypatch.setattr(Proposals, "_within_budget", counted)
        bench = StudyBench(tmp_path, store)
        bench.run(bench.spec(max_trials=3, confirm=0), Hill())
        launched = [trial for trial in bench.study().trials if attributes.LAUNCH_ID in trial.user_attrs]
        assert counts[:4] == [True, True, True, False]
        assert len(launched) == 3
