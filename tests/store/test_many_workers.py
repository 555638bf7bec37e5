"""Several processes that use one database concurrently."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import event

from optuna_dsat.errors import StorageError
from optuna_dsat.store import Store
from optuna_dsat.trials import attributes

STUDY = "shared"
SPEC = {"zero_stages": [1, 2, 3]}

ActorFactory = Callable[..., Any]


def start_together(actors: list[Any]) -> None:
    for actor in actors:
        actor.wait_ready()
    for actor in actors:
        actor.go()


def load(store: Store) -> optuna.Study:
    return optuna.load_study(study_name=STUDY, storage=store.storage)


def test_a_killed_workers_trial_is_enqueued_once_by_two_that_look(ready_url: str, actor: ActorFactory) -> None:
    victim = actor("holds", ready_url)
    victim.wait_ready()
    searchers = [actor("reclaims", ready_url) for _ in range(2)]
    for searcher in searchers:
        searcher.wait_ready()
    victim.process.send_signal(signal.SIGKILL)
    victim.process.wait()
    for searcher in searchers:
        searcher.go()
    result = [number for item in searchers for number in json.loads(item.answer())]
    assert result == [0]
    with Store.open(ready_url) as store:
        study = load(store)
        lost, copy = study.trials
        assert (lost.state, lost.user_attrs[attributes.OUTCOME]) == (TrialState.FAIL, "lost")
        assert copy.state is TrialState.WAITING
        assert copy.params == lost.params
        assert attributes.LAUNCH_ID not in copy.user_attrs
        record = store.find_study(STUDY)
        assert record is not None
        trial = study.ask()
        assert trial.number == copy.number
        micro_batch = trial.suggest_int("train_micro_batch_size_per_gpu", 1, 64)
        assert micro_batch == lost.params["train_micro_batch_size_per_gpu"]
        assert store.claim(record.uuid, f"mbs-{micro_batch}", trial.number)


@pytest.mark.postgres
def test_the_server_restarts_in_the_middle(postgres_server: Any, ready_postgres_url: str, actor: ActorFactory) -> None:
    if postgres_server.restart is None:
        pytest.skip("the server given by the environment is not ours to restart")
    actors = [actor("claims", ready_postgres_url, "20", "40") for _ in range(2)]
    start_together(actors)
    with Store.open(ready_postgres_url) as store:
        while store.find_study(STUDY) is None or len(load(store).trials) < 6:
            time.sleep(0.05)
        postgres_server.restart()
        before = len(load(store).trials)
        assert before >= 6
        won = [key for item in actors for key in json.loads(item.answer())]
        study = load(store)
        complete = study.get_trials(states=(TrialState.COMPLETE,))
        assert len(study.trials) > before, "the restart came after the work was done"
        assert sorted(trial.user_attrs["key"] for trial in complete) == sorted(won)
        assert len(won) == len(set(won)) == 40


def test_a_full_disk_is_a_clear_error_and_leaves_the_study_whole(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        record = store.create_study(STUDY, SPEC)
        engine = store._database.engine
        engine.dispose()

        def limit(dbapi_connection: Any, _record: Any) -> None:
            (pages,) = dbapi_connection.execute("PRAGMA page_count").fetchone()
            dbapi_connection.execute(f"PRAGMA max_page_count={pages}")

        event.listen(engine, "connect", limit)
        with pytest.raises(StorageError, match="database or disk is full"):
            store.save_profile("fingerprint", {"text": "x" * 200_000}, study_uuid=record.uuid)
        event.remove(engine, "connect", limit)
        engine.dispose()
        assert store.find_profile("fingerprint") is None
        store.save_profile("fingerprint", {"text": "x" * 200_000}, study_uuid=record.uuid)
        assert store.find_profile("fingerprint") is not None
