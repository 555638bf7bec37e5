"""Several workers on one study over a simulated landscape."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from collections import Counter

from optuna.trial import TrialState

from optuna_dsat.trials import attributes
from tests.harness.waits import wait_until
from tests.harness.worker import release_file
from tests.harness.workers import StoredStudy, WorkerBench, WorkerProcess


def test_four_workers_start_at_once_on_an_empty_database_and_share_twelve_launches(
    bench: WorkerBench, url: str
) -> None:
    workers = [bench.driver(url, max_trials=12, poll_s=0.05) for _ in range(4)]
    bench.run(workers)
    for worker in workers:
        worker.finish()
    study = StoredStudy.read(url)
    study.check_whole(budget=12)
    assert study.lost == []
    assert sorted(note.key for note in bench.launched()) == sorted(study.measured)
    assert len({note.pid for note in bench.launched()}) == 4
    assert len(bench.launched("profile")) == 1
    own = [trial for trial in study.trials if trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG]
    assert [trial.state for trial in own] == [TrialState.COMPLETE]


def test_one_of_two_workers_is_killed_and_the_other_finishes_all(bench: WorkerBench, sqlite_url: str) -> None:
    url = sqlite_url
    victim, survivor = bench.driver(url, max_trials=5, held=2), bench.driver(url, max_trials=5, poll_s=0.1)
    bench.run([victim, survivor])
    wait_until(lambda: len(bench.by(victim)) == 2 and len(bench.by(survivor)) >= 2, what="both workers launch")
    victim.kill()
    survivor.finish()
    study = StoredStudy.read(url)
    study.check_whole(budget=5)
    assert len(study.lost) == 1
    launched = Counter(note.key for note in bench.launched())
    again = study.lost[0].user_attrs[attributes.CONFIG_KEY]
    assert launched == Counter(study.measured) + Counter([again])


def test_a_worker_that_was_frozen_drops_what_was_given_to_another(bench: WorkerBench, sqlite_url: str) -> None:
    times = {"heartbeat_s": 0.5, "grace_s": 3.0}
    frozen = bench.driver(sqlite_url, max_trials=5, held=2, **times)
    other = bench.driver(sqlite_url, max_trials=5, poll_s=0.1, **times)
    bench.run([frozen, other])
    wait_until(lambda: len(bench.by(frozen)) == 2, what="a launch is in flight")
    wait_until(lambda: stopped_outside_a_transaction(frozen, sqlite_url), what="the worker is frozen")
    try:
        wait_until(lambda: bool(StoredStudy.read(sqlite_url).lost), what="the frozen worker's trial is given back")
        release_file(bench.folder).touch()
    finally:
        frozen.process.send_signal(signal.SIGCONT)
    frozen.finish()
    other.finish()
    study = StoredStudy.read(sqlite_url)
    study.check_whole(budget=5)
    assert len(study.lost) == 1


def stopped_outside_a_transaction(worker: WorkerProcess, sqlite_url: str) -> bool:
    """Stop a process, unless it holds a lock at this moment: nobody could go on then."""
    worker.process.send_signal(signal.SIGSTOP)
    path = sqlite_url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=2.0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            worker.process.send_signal(signal.SIGCONT)
            return False
    return True
