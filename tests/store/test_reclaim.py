from __future__ import annotations

import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import optuna
import psutil
import pytest
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from optuna_dsat.errors import StorageError
from optuna_dsat.runtime.process_identity import start_ticks
from optuna_dsat.samplers import BinarySearchSampler
from optuna_dsat.store import Store, TurnLostError
from optuna_dsat.store.leases import Heartbeat, Worker, this_worker
from optuna_dsat.store.reclaim import Reclaimer
from optuna_dsat.store.tables import HeartbeatRow
from optuna_dsat.trials import attributes
from tests.harness.landscapes import Hill
from tests.harness.studies import StudyBench
from tests.harness.waits import wait_until

KEY = "key"


@pytest.fixture
def ready_url(ready_sqlite_url: str) -> str:
    """Return SQLite alone: of PostgreSQL are ``test_lost_lock`` and ``test_many_workers``."""
    return ready_sqlite_url


@pytest.fixture
def bench(tmp_path: Path, store: Store) -> StudyBench:
    (tmp_path / "train.py").write_text("")
    return StudyBench(tmp_path, store)


def start(store: Store) -> tuple[str, optuna.Study]:
    record = store.create_study("study", {})
    return record.uuid, optuna.load_study(study_name="study", storage=store.storage)


def run_trial(store: Store, study: optuna.Study, study_uuid: str) -> optuna.Trial:
    trial = study.ask()
    store.heartbeat.add(study_uuid, trial.number)
    trial.suggest_int("train_micro_batch_size_per_gpu", 1, 8)
    store.claim(study_uuid, KEY, trial.number)
    return trial


def pretend(store: Store, **columns: object) -> None:
    """Overwrite columns of all heartbeats, to simulate another worker's."""
    store.heartbeat.close()
    with store._database.engine.begin() as connection:
        connection.execute(update(HeartbeatRow).values(**columns))


def dead() -> dict[str, object]:
    return {"pid": 2**22 + 1, "worker": "gone:1"}


def beat_of(store: Store) -> float:
    with store._database.engine.connect() as connection:
        return float(connection.execute(select(HeartbeatRow.beat_at)).scalar_one())


def test_a_living_worker_keeps_its_trial_beyond_the_grace_period(store: Store) -> None:
    study_uuid, study = start(store)
    run_trial(store, study, study_uuid)
    now = [100.0]
    strict = Reclaimer(store._database, store.storage, study_uuid, grace_s=0.0, interval_s=5.0, clock=lambda: now[0])
    for _ in range(2):
        assert strict.reclaim(study) == ()
        seen = beat_of(store)
        wait_until(lambda: beat_of(store) > seen, what="its heartbeat is renewed")  # noqa: B023 - called at once
        now[0] += 100.0
    assert strict.reclaim(study) == ()
    store.heartbeat.close()
    now[0] += 100.0
    assert strict.reclaim(study) == (0,), "without a heartbeat, it is lost"


def test_a_dead_process_on_this_machine_loses_its_trial_at_once(store: Store) -> None:
    study_uuid, study = start(store)
    run_trial(store, study, study_uuid)
    pretend(store, **dead())
    assert store.reclaim_stale(study) == (0,)
    assert store.reclaim_stale(study) == ()
    lost, copy = study.trials
    assert lost.state is TrialState.FAIL
    assert lost.user_attrs[attributes.MESSAGE] == "its worker (gone:1) was lost"
    assert copy.params == lost.params
    with warnings.catch_warnings(category=optuna.exceptions.ExperimentalWarning, action="ignore"):
        assert RetryHeartbeatStaleTrialCallback.retried_trial_number(copy) == 0
        assert RetryHeartbeatStaleTrialCallback.retry_history(copy) == [0]
    assert store.claim(study_uuid, KEY, study.ask().number)


def test_another_machines_silence_is_believed_after_the_grace_period(store: Store) -> None:
    study_uuid, study = start(store)
    run_trial(store, study, study_uuid)
    pretend(store, machine="another", pid=1)
    assert store.reclaim_stale(study) == ()
    wait_until(lambda: store.reclaim_stale(study) == (0,), what="it is believed")


def reclaims_after(store: Store, *, beat_at: float) -> Callable[[float], tuple[int, ...]]:
    """Return what reclaims the lost trials of a study, some seconds later each time.

    Its trial 0 is of another machine, with a heartbeat of this time.
    """
    study_uuid, study = start(store)
    run_trial(store, study, study_uuid)
    pretend(store, machine="another", beat_at=beat_at)
    now = [100.0]
    reclaimer = Reclaimer(
        store._database, store.storage, study_uuid, grace_s=60.0, interval_s=5.0, clock=lambda: now[0]
    )

    def reclaim_after(seconds: float) -> tuple[int, ...]:
        now[0] += seconds
        return tuple(reclaimer.reclaim(study))

    return reclaim_after


def test_an_old_heartbeat_is_watched_before_it_is_believed(store: Store) -> None:
    reclaim_after = reclaims_after(store, beat_at=1.0)
    assert reclaim_after(0.0) == ()
    assert reclaim_after(9.9) == ()
    pretend(store, beat_at=2.0)
    assert reclaim_after(0.2) == ()
    assert reclaim_after(10.0) == (0,)


def test_a_heartbeat_of_the_future_is_believed_for_the_grace_period(store: Store) -> None:
    """The clock of the database's server went back by hours, and the worker of another machine is gone."""
    reclaim_after = reclaims_after(store, beat_at=time.time() + 7200)
    assert reclaim_after(0.0) == ()
    assert reclaim_after(59.0) == ()
    assert reclaim_after(2.0) == (0,)


def test_a_trial_whose_worker_ended_before_its_first_heartbeat_is_lost_at_once(store: Store) -> None:
    study_uuid, study = start(store)
    study.ask().suggest_int("train_micro_batch_size_per_gpu", 1, 8)
    patient = Reclaimer(store._database, store.storage, study_uuid, grace_s=1e6)
    assert patient.reclaim(study) == (0,)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.WAITING]
    assert patient.reclaim(study) == ()


def test_a_trial_gets_its_first_heartbeat_while_the_lock_is_held_that_workers_ask_under(bench: StudyBench) -> None:
    held: list[bool] = []
    exclusive, add = bench.store._database.exclusive, bench.store.heartbeat.add

    @contextmanager
    def watched(purpose: str) -> Iterator[None]:
        with exclusive(purpose):
            held.append(True)
            yield
            held.clear()

    def noted(study_uuid: str, number: int) -> None:
        if number >= 0:
            seen.append(bool(held))
        add(study_uuid, number)

    seen: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store._database, "exclusive", watched)
        patch.setattr(bench.store.heartbeat, "add", noted)
        bench.run(bench.spec(max_trials=2, confirm=0), Hill())
    assert seen == [True, True]


def test_a_trial_that_decided_nothing_is_drawn_again_as_it_would_have_been(store: Store) -> None:
    def configurations(name: str, *, lost: int | None) -> list[dict[str, object]]:
        study_uuid = store.create_study(name, {}).uuid
        study = optuna.load_study(study_name=name, storage=store.storage, sampler=BinarySearchSampler(seed=1))
        for turn in range(4):
            trial = study.ask()
            if turn == lost:
                store.heartbeat.add(study_uuid, trial.number)
                pretend(store, **dead())
                assert store.reclaim_stale(study) == (trial.number,)
                trial = study.ask()
            trial.suggest_categorical("zero_stage", range(50))
            trial.suggest_int("train_micro_batch_size_per_gpu", 1, 1)
            study.tell(trial, 1.0)
        return [item.params for item in study.get_trials(states=(TrialState.COMPLETE,))]

    undisturbed = configurations("undisturbed", lost=None)
    assert len({item["zero_stage"] for item in undisturbed}) > 2
    assert configurations("lost", lost=1) == undisturbed


def test_an_enqueued_trial_keeps_its_wishes(store: Store) -> None:
    study_uuid, study = start(store)
    study.enqueue_trial({"zero_stage": 3}, user_attrs={attributes.PURPOSE: attributes.USER_CONFIG})
    trial = study.ask()
    store.heartbeat.add(study_uuid, trial.number)
    for name in (attributes.DATA_LIMIT, attributes.ROOT_LAUNCH, attributes.SKIPPED_STEPS):  # killed before its tell
        trial.set_user_attr(name, 3)
    pretend(store, **dead())
    store.reclaim_stale(study)
    copy = study.ask()
    assert copy.user_attrs == {attributes.PURPOSE: attributes.USER_CONFIG}
    assert copy.suggest_categorical("zero_stage", [1, 2, 3]) == 3


def test_a_configuration_that_kills_its_workers_is_given_up(store: Store) -> None:
    study_uuid, study = start(store)
    for loss in range(4):
        heartbeat = Heartbeat(store._database, worker=this_worker(), interval_s=60.0)
        trial = study.ask()
        heartbeat.add(study_uuid, trial.number)
        heartbeat.close()
        trial.suggest_int("train_micro_batch_size_per_gpu", 1, 8)
        assert store.claim(study_uuid, KEY, trial.number)
        pretend(store, **dead())
        assert store.reclaim_stale(study) == (loss,)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * 4
    assert not store.claim(study_uuid, KEY, 4)
    assert store.claim(study_uuid, KEY, 3)


def test_a_reclaim_that_was_cut_off_is_finished_by_the_next(store: Store) -> None:
    study_uuid, study = start(store)
    trial = run_trial(store, study, study_uuid)
    trial.set_user_attr(attributes.OUTCOME, "lost")
    store.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    pretend(store, **dead())
    assert store.reclaim_stale(study) == ()
    assert [t.state for t in study.trials] == [TrialState.FAIL, TrialState.WAITING]
    assert store.reclaim_stale(study) == ()
    assert len(study.trials) == 2


def test_the_heartbeat_of_a_finished_trial_is_swept_up(store: Store) -> None:
    study_uuid, study = start(store)
    trial = run_trial(store, study, study_uuid)
    study.tell(trial, 1.0)
    pretend(store, **dead())
    assert store.reclaim_stale(study) == ()
    assert [t.state for t in study.trials] == [TrialState.COMPLETE]
    with store._database.engine.connect() as connection:
        assert connection.execute(select(HeartbeatRow)).all() == []


def test_a_returned_trial_costs_no_retry(store: Store) -> None:
    study_uuid, study = start(store)
    for number in range(6):
        trial = run_trial(store, study, study_uuid)
        assert store.return_trial(study, trial, reason="the search was stopped")
        assert not store.return_trial(study, trial, reason="again")
        assert len(study.trials) == number + 2
    assert study.trials[0].user_attrs[attributes.MESSAGE] == "the search was stopped"


def test_a_frozen_worker_learns_that_its_trial_was_given_back(ready_url: str) -> None:
    with Store.open(ready_url, heartbeat_interval_s=0.2, grace_s=1.0) as store:
        study_uuid, study = start(store)
        trial = run_trial(store, study, study_uuid)
        assert store.heartbeat.is_own(study_uuid, trial.number)
        with store._database.engine.begin() as connection:
            connection.execute(update(HeartbeatRow).values(**dead()))
        assert store.reclaim_stale(study) == (0,)
        wait_until(lambda: not store.heartbeat.is_own(study_uuid, trial.number), what="it learns that")
        study.tell(trial, 1.0, skip_if_finished=True)
        store.heartbeat.remove(study_uuid, trial.number)
        assert [t.state for t in study.trials] == [TrialState.FAIL, TrialState.WAITING]


def test_a_trial_that_is_being_finished_is_not_taken_for_lost_in_between(store: Store) -> None:
    """Its worker wakes after another one has found it dead: one of them says what became of it, and not both."""
    study_uuid, study = start(store)
    trial = run_trial(store, study, study_uuid)
    lost: list[tuple[int, ...]] = []
    other = threading.Thread(target=lambda: lost.append(store.reclaim_stale(study)))

    def finish() -> None:
        trial.set_user_attr(attributes.OUTCOME, "measured")
        pretend(store, **dead())
        other.start()
        time.sleep(0.2)
        study.tell(trial, 1.0)

    assert store.finish(study_uuid, trial, finish)
    other.join()
    assert lost == [()]
    assert [(item.state, item.user_attrs[attributes.OUTCOME]) for item in study.trials] == [
        (TrialState.COMPLETE, "measured")
    ]
    assert not store.finish(study_uuid, trial, lambda: pytest.fail("it is not this worker's any more"))


def test_what_is_written_in_a_lost_turn_is_refused(store: Store) -> None:
    study_uuid, _ = start(store)
    with store.conclusion_turn(study_uuid) as turn:
        assert turn is not None
        with turn.held("store a round"):
            pass
        pretend(store, machine="another")  # of the same host and process number in its own container
        with pytest.raises(TurnLostError), turn.held("store a round"):
            pytest.fail("it is another worker's")


def test_no_write_passes_for_a_turn_that_is_anothers_since_the_lock_was_freed(store: Store) -> None:
    """As after the restart of a PostgreSQL server between the look and the write."""
    study_uuid, study = start(store)

    def write() -> None:
        study.set_user_attr("before", 1)
        taker = threading.Thread(target=pretend, args=(store,), kwargs={"machine": "another"})
        taker.start()
        taker.join()
        study.set_user_attr("in_the_lost_turn", 1)

    with store.conclusion_turn(study_uuid) as turn:
        assert turn is not None
        with pytest.raises(TurnLostError), turn.held("store a round"):
            write()
        with pytest.raises(TurnLostError), turn.held("store a profile"):
            pytest.fail("it is another worker's")
        study.set_user_attr("after", 1)
    assert {"before", "in_the_lost_turn", "after"} & set(study.user_attrs) == {"before", "after"}


def test_a_turn_that_ends_with_the_database_waits_for_it_no_longer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_uuid, _ = start(store)
    attempts = []

    def away() -> None:
        attempts.append(1)
        raise OperationalError("SELECT 1", {}, ConnectionError("refused"))

    def conclude() -> None:
        with store.conclusion_turn(study_uuid):
            monkeypatch.setattr(store._database, "require_present", away)
            raise StorageError("It was waited for long.")

    with pytest.raises(StorageError, match="waited for long"):
        conclude()
    assert len(attempts) == 1


def test_a_frozen_worker_leaves_the_turn_to_whom_it_was_given(ready_url: str) -> None:
    with Store.open(ready_url) as store:
        study_uuid, _ = start(store)
        with store.profile_turn(study_uuid) as mine:
            assert mine
            pretend(store, worker="another:1", pid=1, pid_started_at=float(start_ticks(1) or 0))
        with store.profile_turn(study_uuid) as mine:
            assert not mine, "the other one still measures"


def test_a_process_is_dead_only_where_it_can_be_seen() -> None:
    me = this_worker()
    assert not me.is_dead()
    assert replace(me, pid_started_at=me.pid_started_at - 1000).is_dead()
    assert not replace(me, machine="another", pid=2**22 + 1).is_dead()
    assert Worker(name="", machine=me.machine, pid=2**22 + 1, pid_started_at=0.0).is_dead()


def test_a_clock_that_steps_kills_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_worker()
    now = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: now + 3600.0)  # as after a step of an hour
    assert not me.is_dead()
    assert this_worker() == me


def test_a_worker_that_is_a_zombie_is_dead() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        start = start_ticks(process.pid)
        assert start is not None
        worker = replace(this_worker(), pid=process.pid, pid_started_at=float(start))
        assert not worker.is_dead()
        process.kill()
        wait_until(worker.is_dead, what="it is seen to be dead")
    assert worker.is_dead()
