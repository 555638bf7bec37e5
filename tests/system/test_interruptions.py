"""What goes wrong around a study, and that it comes out whole; over a simulated landscape."""

from __future__ import annotations

import sqlite3
from subprocess import TimeoutExpired

import pytest

from tests.harness.databases import Server
from tests.harness.workers import StoredStudy, WorkerBench, wait_until

BUDGET = 8


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, forks: None) -> list[str]:  # noqa: ARG001 - the worker needs it
    """Return the configurations that a study of the same seed measures when nothing happens to it."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "train.py").write_text("")
    url = f"sqlite:///{folder}/unbroken.db"
    bench = WorkerBench(folder)
    worker = bench.driver(url, max_trials=BUDGET)
    bench.run([worker])
    worker.finish()
    return sorted(StoredStudy.read(url).measured)


@pytest.mark.postgres
def test_kill_9_and_resume_measure_what_an_unbroken_study_does(
    bench: WorkerBench, postgres_url: str, unbroken: list[str]
) -> None:
    url = postgres_url
    for number in range(2):
        victim = bench.driver(url, max_trials=BUDGET, held=3)
        bench.run([victim])
        wait_until(lambda: len(bench.by(victim)) == 3, what="the third launch starts")  # noqa: B023
        victim.kill()
        assert len(StoredStudy.read(url).lost) == number
    resumed = bench.driver(url, max_trials=BUDGET, conclude=True)
    bench.run([resumed])
    resumed.finish()
    study = StoredStudy.read(url)
    study.check_whole(budget=BUDGET)
    assert len(study.lost) == 2
    assert sorted(study.measured) == unbroken


@pytest.mark.postgres
def test_the_server_restarts_in_the_middle_of_a_study(
    postgres_server: Server, postgres_url: str, bench: WorkerBench
) -> None:
    if postgres_server.restart is None:
        pytest.skip("the server given by the environment is not ours to restart")
    workers = [bench.driver(postgres_url, max_trials=20, poll_s=0.05, heartbeat_s=0.5, grace_s=5.0) for _ in range(2)]
    bench.run(workers)
    for launches in (4, 10):
        wait_until(lambda: len(bench.launched()) >= launches, what=f"{launches} launches")  # noqa: B023
        before = set(StoredStudy.read(postgres_url).measured)
        postgres_server.restart()
        assert before <= set(StoredStudy.read(postgres_url).measured)
    assert len(bench.launched()) < 20, "the restarts came after the work was done"
    for worker in workers:
        worker.finish()
    StoredStudy.read(postgres_url).check_whole(budget=20)


def test_a_database_locked_for_longer_than_sqlite_waits_by_itself(
    bench: WorkerBench, sqlite_url: str, unbroken: list[str]
) -> None:
    worker = bench.driver(sqlite_url, max_trials=BUDGET, poll_s=0.1)
    bench.run([worker])
    wait_until(lambda: len(bench.launched()) >= 3, what="three launches")
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None, timeout=30.0)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TimeoutExpired):
        worker.process.wait(7.0)  # Python's own limit is five seconds
    assert len(bench.launched()) <= 4
    other.rollback()
    other.close()
    worker.finish()
    study = StoredStudy.read(sqlite_url)
    study.check_whole(budget=BUDGET)
    assert study.lost == []
    assert sorted(study.measured) == unbroken
