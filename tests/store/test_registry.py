from __future__ import annotations

import threading
import time
from dataclasses import replace

import optuna
import pytest
from optuna.study import StudyDirection
from sqlalchemy import text

from optuna_dsat.errors import StudyConflictError, UsageError
from optuna_dsat.launch.protocol import Conditions, LaunchReport
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import RankStarted, StepMeasured
from optuna_dsat.store import Store
from tests.harness.events import report_of, step_of

SPEC = {"script": "train.py", "zero_stages": [1, 2], "timeout_s": None}
TABLES = ("dsat_studies", "dsat_launches", "dsat_steps", "dsat_claims", "dsat_heartbeats")


def rows(store: Store) -> dict[str, int]:
    with store._database.engine.connect() as connection:
        return {name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in TABLES}


def report() -> LaunchReport:
    return report_of(error_excerpt="torch.OutOfMemoryError\x00")


def step(rank: int, number: int, *, loss: float | None = 2.5) -> StepMeasured:
    return step_of(rank, number, samples=4, loss=loss)


def fill(store: Store, study_uuid: str) -> None:
    store.record_launch(study_uuid, report(), trial_number=0, purpose="trial", attempt=0)
    store.record_steps(study_uuid, "trial-0000", [step(0, 1)])
    store.claim(study_uuid, "key", 0)


def test_a_study_is_created_found_and_listed(store: Store) -> None:
    record = store.create_study("llama", SPEC, direction="minimize")
    assert record.spec == SPEC
    assert record.versions["optuna"] == optuna.__version__
    assert store.find_study("llama") == record
    assert store.list_studies() == (record,)
    study = optuna.load_study(study_name="llama", storage=store.storage)
    assert study.direction is StudyDirection.MINIMIZE
    assert study.user_attrs["dsat_study_uuid"] == record.uuid


def test_a_study_is_created_once(store: Store) -> None:
    record = store.create_study("llama", SPEC)
    assert store.create_study("llama", {**SPEC, "zero_stages": [3]}) == record == store.find_study("llama")


def test_a_foreign_study_is_left_alone(store: Store) -> None:
    study = optuna.create_study(study_name="foreign", storage=store.storage, direction="maximize")
    study.add_trial(optuna.create_trial(value=1.0))
    with pytest.raises(StudyConflictError, match="did not make"):
        store.create_study("foreign", SPEC)
    assert store.find_study("foreign") is None
    assert store.list_studies() == ()
    with pytest.raises(UsageError, match="no study 'foreign'"):
        store.delete_study("foreign")


def test_what_a_killed_creator_left_is_completed(store: Store) -> None:
    optuna.create_study(study_name="half", storage=store.storage, direction="maximize")
    record = store.create_study("half", SPEC)
    assert store.find_study("half") == record


def test_deleting_takes_all_but_the_profile(store: Store) -> None:
    record = store.create_study("llama", SPEC)
    other = store.create_study("other", SPEC)
    fill(store, record.uuid)
    fill(store, other.uuid)
    store.save_profile("fingerprint", {"params": 1}, study_uuid=record.uuid)
    store.delete_study("llama")
    assert store.find_study("llama") is None
    assert rows(store) == {**dict.fromkeys(TABLES, 1), "dsat_heartbeats": 0}
    assert store.find_profile("fingerprint") is not None
    assert store.launches(other.uuid)
    with pytest.raises(UsageError, match="no study 'llama'"):
        store.delete_study("llama")


def test_rows_of_a_study_deleted_with_optuna_are_collected_by_who_makes_studies_not_by_readers(ready_url: str) -> None:
    with Store.open(ready_url) as store:
        record = store.create_study("gone", SPEC)
        fill(store, record.uuid)
        study = optuna.load_study(study_name="gone", storage=store.storage)
        store.heartbeat.add(record.uuid, study.ask().number)
    storage = optuna.storages.RDBStorage(ready_url)
    optuna.delete_study(study_name="gone", storage=storage)
    storage.remove_session()
    storage.engine.dispose()
    with Store.open(ready_url, create=False) as store:
        assert rows(store)["dsat_launches"] == 1
        assert not store.list_studies()
    with Store.open(ready_url) as store:
        assert rows(store) == dict.fromkeys(TABLES, 0)
        assert store.create_study("gone", SPEC).uuid != record.uuid


def test_launches_and_steps_come_back_as_they_were(store: Store) -> None:
    record = store.create_study("llama", SPEC)
    for _ in range(2):  # the second write simulates a lost acknowledgement
        store.record_launch(record.uuid, report(), trial_number=None, purpose="profile", attempt=1)
        started = RankStarted(rank=0, time=1.0, local_rank=0, world_size=2, pid=1)
        events = [started, step(1, 2), step(0, 2, loss=float("nan")), step(0, 1)]
        store.record_steps(record.uuid, "trial-0000", events)
    (launch,) = store.launches(record.uuid)
    assert (launch.trial_number, launch.purpose, launch.attempt) == (None, "profile", 1)
    assert launch.report.error_excerpt == "torch.OutOfMemoryError\N{SYMBOL FOR NULL}"
    assert launch.report.missing_bytes == 5 * 2**30
    assert launch.report.devices == (0, 1)
    assert launch.report.outcome is Outcome.OUT_OF_MEMORY
    assert store.steps(record.uuid, "trial-0000") == (step(0, 1), step(0, 2, loss=None), step(1, 2))
    assert store.steps(record.uuid, "trial-0001") == ()


def test_a_steps_time_is_the_mean_of_its_ranks(store: Store) -> None:
    record = store.create_study("llama", SPEC)
    times = {(0, 1): 9.0, (1, 1): 9.0, (0, 2): 0.25, (1, 2): 0.5, (0, 3): 1.0, (1, 3): 0.5}
    events = [replace(step(rank, number), latency_s=latency_s) for (rank, number), latency_s in times.items()]
    store.record_steps(record.uuid, "trial-0000", events)
    store.record_steps(record.uuid, "trial-0001", [step(0, 1)])
    assert store.step_times(record.uuid, from_step=2) == {"trial-0000": (0.375, 0.75)}


def test_a_skipped_step_is_kept_and_is_not_one_of_those_that_count(store: Store) -> None:
    record = store.create_study("llama", SPEC)
    events = [
        replace(step(0, 1), latency_s=8.0),
        replace(step(0, 2), latency_s=4.0, skipped=True, skipped_before=0),
        replace(step(0, 3), latency_s=2.0, skipped=True, skipped_before=1),
        replace(step(0, 4), latency_s=0.5, skipped_before=2, elements=4096, elements_are_tokens=True),
    ]
    store.record_steps(record.uuid, "trial-0000", events)
    assert store.steps(record.uuid, "trial-0000") == tuple(events)
    assert store.step_times(record.uuid, from_step=1) == {"trial-0000": (8.0, 0.5)}
    assert store.step_times(record.uuid, from_step=2) == {"trial-0000": (0.5,)}


def test_what_went_on_beside_a_launch_is_kept_with_it(store: Store) -> None:
    record = store.create_study("llama", SPEC)
    conditions = Conditions(window_s=2.0, others_cpu_s=0.5, cores=2, throttle_reasons=("power cap",))
    words = replace(report(), conditions=conditions)
    store.record_launch(record.uuid, words, trial_number=None, purpose="confirm", attempt=0)
    (launch,) = store.launches(record.uuid)
    assert launch.report.conditions == conditions


def test_many_steps_are_stored(store: Store) -> None:
    record = store.create_study("llama", SPEC)
    store.record_steps(record.uuid, "full", [step(rank, n) for n in range(1, 301) for rank in range(2)])
    assert len(store.steps(record.uuid, "full")) == 600


def test_a_profile_is_replaced_by_a_later_one(store: Store) -> None:
    assert store.find_profile("fp") is None
    store.save_profile("fp", {"params": 1}, study_uuid="a")
    store.save_profile("fp", {"params": 2}, study_uuid="b")
    assert store.find_profile("fp") == {"params": 2}


def test_a_claim_is_one_trials_until_it_is_released(store: Store) -> None:
    assert store.claim("study", "key", 1)
    assert store.claim("study", "key", 1), "the same trial may repeat its claim"
    assert not store.claim("study", "key", 2)
    assert store.claim("another study", "key", 2)
    assert store.claim("study", "key", 1), "a claim in another study changes nothing"
    store.release_claim("study", "key")
    assert store.claim("study", "key", 2)


def test_a_study_that_is_deleted_by_two_at_once_is_deleted_by_one(store: Store) -> None:
    store.create_study("twice", {})
    words: list[str] = []

    def delete() -> None:
        try:
            store.delete_study("twice")
        except UsageError as error:
            words.append(str(error))

    both = [threading.Thread(target=delete) for _ in range(2)]
    with store._database.exclusive("let both wait"):
        for item in both:
            item.start()
        time.sleep(0.3)
    for item in both:
        item.join()
    assert [text.split(" in ")[0] for text in words] == ["There is no study 'twice'"]
