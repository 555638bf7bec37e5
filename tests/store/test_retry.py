from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import optuna
import psycopg
import pytest
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from optuna_dsat.errors import StorageError, StudyDeletedError
from optuna_dsat.store import Store
from optuna_dsat.store.retry import RetryingStorage, is_transient, one_line_reason, retrying


def sqlite_error(code: int, message: str) -> DBAPIError:
    original = sqlite3.OperationalError(message)
    original.sqlite_errorcode = code
    return OperationalError("UPDATE t SET x = :secret", {"secret": "hunter2"}, original)


LOCKED = sqlite_error(5, "database is locked")
FULL = sqlite_error(13, "database or disk is full")


class PostgresError(Exception):
    """Stub of a psycopg error; its SQLSTATE is None if the server sent none."""

    def __init__(self, sqlstate: str | None) -> None:
        super().__init__("server closed the connection unexpectedly\n\tThis probably means trouble.")
        self.sqlstate = sqlstate


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [error] * times

    def work() -> str:
        if left:
            raise left.pop()
        return "done"

    return work


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LOCKED, True),
        (sqlite_error(517, "database is locked"), True),
        (FULL, False),
        (sqlite_error(8, "attempt to write a readonly database"), True),
        (sqlite_error(1544, "attempt to write a readonly database"), True),  # its folder is read-only
        (sqlite_error(264, "attempt to write a readonly database"), True),
        (sqlite_error(1032, "attempt to write a readonly database"), False),  # the file was moved
        (DBAPIError("INSERT", {}, PostgresError("25006")), True),
        (OperationalError("SELECT 1", {}, PostgresError(None)), True),
        (OperationalError("SELECT 1", {}, PostgresError("57P01")), True),
        (OperationalError("SELECT 1", {}, PostgresError("53100")), False),
        (DBAPIError("SELECT 1", {}, PostgresError("42601")), False),
        (IntegrityError("INSERT", {}, sqlite3.IntegrityError("unique")), False),
        (DBAPIError("SELECT 1", {}, PostgresError("XX000"), connection_invalidated=True), True),
        (ValueError("no database in sight"), False),
    ],
)
def test_which_errors_pass_by_themselves(error: Exception, expected: bool) -> None:
    assert is_transient(error) is expected
    wrapped = StorageInternalError("An exception is raised during the commit.")
    wrapped.__cause__ = error
    assert is_transient(wrapped) is expected


@pytest.mark.parametrize(
    "error",
    [
        IntegrityError("INSERT", {}, PostgresError("23503")),
        sqlite_error(787, "FOREIGN KEY constraint failed"),
    ],
)
def test_a_row_whose_study_is_gone_says_that_the_study_was_deleted(error: Exception) -> None:
    with pytest.raises(StudyDeletedError, match="deleted from db while it was searched"):
        retrying(failing(1, error), database="db")


def test_a_database_that_stays_away_is_one_clear_line() -> None:
    error = OperationalError("SELECT 1", {}, PostgresError(None))
    with pytest.raises(StorageError, match=r"did not come back within 0\.2 s: server closed") as caught:
        retrying(failing(1000, error), database="postgresql://me:***@host/db", limit_s=0.2)
    assert "\n" not in str(caught.value)


def test_a_wait_that_was_in_vain_is_not_repeated_by_the_caller_of_its_caller() -> None:
    tried = failing(1000, LOCKED)
    calls = []

    def work() -> str:
        calls.append(1)
        return retrying(tried, database="db", limit_s=0.1)

    with pytest.raises(StorageError, match=r"did not come back within 0\.1 s"):
        retrying(work, database="db", limit_s=60)
    assert len(calls) == 1


def test_a_wait_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("optuna_dsat.store.retry._SILENT_S", 0.0)
    away = OperationalError("SELECT 1", {}, PostgresError(None))
    assert retrying(failing(3, away), database="db") == "done"
    text = [record.getMessage() for record in caplog.records]
    assert len(text) == 2, text
    assert "db cannot be used, waiting up to 60 s for it: server closed" in text[0]
    assert "db can be used again after" in text[1]


def test_transient_errors_are_waited_out_and_a_short_wait_is_not_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("optuna_dsat.store.retry._SILENT_S", 60.0)  # 2 s pass on a busy machine
    assert retrying(failing(3, LOCKED), database="db") == "done"
    assert not caplog.records


def test_a_lasting_error_is_not_tried_again() -> None:
    work = failing(1, FULL)
    with pytest.raises(StorageError, match="database or disk is full") as caught:
        retrying(work, database="db")
    assert "hunter2" not in str(caught.value)
    assert work() == "done"


def test_other_errors_pass_through() -> None:
    with pytest.raises(KeyError):
        retrying(failing(1, KeyError("trial")), database="db")


def test_a_reason_has_one_line_without_sql() -> None:
    error = OperationalError("SELECT 1", {}, PostgresError(None))
    assert one_line_reason(error) == "server closed the connection unexpectedly"


class LosesAcknowledgements(InMemoryStorage):
    """Storage that raises a transient error once per method, after the operation was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()

    def _lose(self, method: str) -> None:
        if method not in self.lost:
            self.lost.add(method)
            raise StorageInternalError("An exception is raised during the commit.") from LOCKED

    def set_trial_state_values(self, *args: Any, **kwargs: Any) -> bool:
        done = super().set_trial_state_values(*args, **kwargs)
        self._lose("state")
        return done

    def create_new_trial(self, *args: Any, **kwargs: Any) -> int:
        made = super().create_new_trial(*args, **kwargs)
        self._lose("trial")
        return made

    def delete_study(self, study_id: int) -> None:
        super().delete_study(study_id)
        self._lose("delete")

    def set_trial_user_attr(self, *args: Any, **kwargs: Any) -> None:
        super().set_trial_user_attr(*args, **kwargs)
        self._lose("attr")


def test_a_lost_acknowledgement_does_not_undo_or_repeat_anything() -> None:
    backend = LosesAcknowledgements()
    storage = RetryingStorage(backend, database="db")
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "one")
    trial_id = storage.create_new_trial(study_id, create_trial(state=TrialState.WAITING))
    assert storage.set_trial_state_values(trial_id, TrialState.RUNNING)
    assert not storage.set_trial_state_values(trial_id, TrialState.RUNNING), "another one's"
    backend.lost.clear()
    storage.set_trial_user_attr(trial_id, "key", 1)
    assert storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [1.5])
    trial = storage.get_trial(trial_id)
    assert (trial.state, trial.value, trial.user_attrs) == (TrialState.COMPLETE, 1.5, {"key": 1})
    assert len(storage.get_all_trials(study_id)) == 1
    with pytest.raises(UpdateFinishedTrialError):
        storage.set_trial_state_values(trial_id, TrialState.FAIL)
    storage.delete_study(study_id)
    with pytest.raises(KeyError):
        storage.delete_study(study_id)


@pytest.mark.postgres
def test_a_trial_whose_commit_is_cut_is_there_once(ready_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna creates it once more by itself after the errors that it knows: all later ones had other numbers."""
    with Store.open(ready_postgres_url) as store:
        store.create_study("one", {})
        study = optuna.load_study(study_name="one", storage=store.storage)
        dialect = store._rdb.engine.dialect
        commit = dialect.do_commit
        cut: list[str] = []

        def lose(connection: Any) -> None:
            commit(connection)
            if len(cut) < 2:
                cut.append("after the commit")
                connection.driver_connection.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")

        for create in (lambda: study.enqueue_trial({"stage": 1}), study.ask, study.ask):
            cut.clear()
            monkeypatch.setattr(dialect, "do_commit", lose)
            create()
            monkeypatch.setattr(dialect, "do_commit", commit)
            assert len(cut) == 2
        assert [(trial.number, trial.state) for trial in study.trials] == [
            (0, TrialState.RUNNING),
            (1, TrialState.RUNNING),
        ]


def test_a_trial_that_another_worker_finished_stays_theirs() -> None:
    backend = LosesAcknowledgements()
    storage = RetryingStorage(backend, database="db")
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE])
    trial_id = storage.create_new_trial(study_id)
    backend.lost.add("state")
    backend.set_trial_state_values(trial_id, TrialState.FAIL)
    with pytest.raises(UpdateFinishedTrialError):
        storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [1.0])


def test_ask_and_tell_give_no_warning_about_heartbeats() -> None:
    storage = RetryingStorage(InMemoryStorage(), database="db")
    study = optuna.create_study(storage=storage)
    study.tell(study.ask(), 1.0)
    assert study.best_value == 1.0


@pytest.mark.postgres
def test_a_server_that_is_read_only_for_a_while_is_waited_for(ready_postgres_url: str) -> None:
    """As after a failover: sessions stay read-only until they are closed."""
    with Store.open(ready_postgres_url) as store:
        store.create_study("one", {})
        study = optuna.load_study(study_name="one", storage=store.storage)
        with psycopg.connect(ready_postgres_url.replace("+psycopg", ""), autocommit=True) as admin:
            name = admin.info.dbname
            admin.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
            for other in admin.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s", [name]).fetchall():
                if other[0] != admin.info.backend_pid:
                    admin.execute("SELECT pg_terminate_backend(%s, 60000)", other)

            promoted = threading.Event()

            def promote() -> None:
                promoted.set()
                admin.execute("SET default_transaction_read_only = off")
                admin.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')

            timer = threading.Timer(0.7, promote)
            timer.start()
            try:
                trial = study.ask()
                assert promoted.is_set()
            finally:
                timer.join()
        assert trial.number == 0
        assert len(study.trials) == 1
