"""A sample of all crash points; what the checks find when something is wrong; that the points are those of the work."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.crash_points.checks import Aftermath, violations
from tests.crash_points.chosen import Strike, all_strikes, distinct, drawn
from tests.crash_points.command import Ended
from tests.crash_points.launcher import Launched
from tests.crash_points.observed import Observed, StoredTrial
from tests.crash_points.points import Blow, Point, applies
from tests.crash_points.results import Results
from tests.crash_points.runs import METHODS, SEED, Case, Reference, Tried
from tests.harness.databases import EXTERNAL, Server

ROOT = Path(__file__).parents[2]
SAMPLE = 4
"""Blows of a run of the suite on each database; ``make crash-points`` tries all."""
LIMIT_S = 600.0

CASE = Case(method="random", database="sqlite")
WELL = Ended(code=0, stdout="", stderr="")
KILLED = Ended(code=-9, stdout="", stderr="")
TRIAL = StoredTrial(number=0, state="COMPLETE", value=1.0, outcome="measured", key="a")
STORED = Observed(trials=(TRIAL,), claims=(0,), launches=("trial-0000",), studies=("s",))
LAUNCH = Launched(launch_id="trial-0000", purpose="trial", key="a", ended=False)
UNDISTURBED = Aftermath(
    blow=None,
    first=WELL,
    second=None,
    between=STORED,
    after=STORED,
    launches=(LAUNCH, replace(LAUNCH, ended=True)),
    launches_of_first=(),
    kept=frozenset(),
    files=frozenset({"work/study.db"}),
    processes=(),
    result={"value": 1.0},
)
KILL = replace(UNDISTURBED, blow=Blow.KILL, first=KILLED, second=WELL)


def run_sample(database: str, environ: Mapping[str, str] = MappingProxyType({})) -> None:
    """Try points of one method, both drawn by a seed, which is printed; the environment may give it."""
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(10**6))
    chosen = ("--methods", METHODS[seed % len(METHODS)], "--databases", database, "--seed", str(seed))
    command = [sys.executable, "-m", "tests.crash_points", "--jobs", "1", "--sample", str(SAMPLE), *chosen]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=LIMIT_S
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEED}={seed}" in done.stdout
    assert f"{SAMPLE} blows, 0 with violations" in done.stdout


def test_a_sample_of_all_points_on_sqlite() -> None:
    run_sample("sqlite")


@pytest.mark.postgres
def test_a_sample_of_all_points_on_postgres(postgres_server: Server) -> None:
    run_sample("postgres", {EXTERNAL: postgres_server.url})


def test_a_study_that_came_out_whole_has_no_violation() -> None:
    assert violations(UNDISTURBED, UNDISTURBED, budget=1) == []
    assert violations(KILL, UNDISTURBED, budget=1) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"first": replace(WELL, code=None)}, "the first process hung"),
        ({"first": WELL}, "the first process ended with 0"),
        ({"second": replace(WELL, code=1)}, "the second process ended with 1"),
        ({"second": replace(WELL, stderr="Traceback (most recent call last)\nE: x")}, "traceback: E: x"),
        ({"second": replace(WELL, stderr="x" * 1001)}, "a line of 1001 characters"),
        ({"after": replace(STORED, trials=())}, "finished trial changed"),
        ({"after": replace(STORED, launches=())}, "recorded launches are gone"),
        ({"after": replace(STORED, trials=(TRIAL, replace(TRIAL, number=1, key="b")))}, "2 launches of a budget of 1"),
        ({"after": replace(STORED, trials=(TRIAL, replace(TRIAL, number=1)))}, "measured 2 times"),
        ({"after": replace(STORED, trials=(TRIAL, replace(TRIAL, number=1, state="RUNNING")))}, "trial 1 is RUNNING"),
        ({"after": replace(STORED, claims=())}, "trials without a claim: [0]"),
        ({"after": replace(STORED, claims=(0, 3))}, "claims left of trials [3]"),
        ({"after": replace(STORED, heartbeats=(0,))}, "signs of life left"),
        ({"after": replace(STORED, locked=True)}, "the lock of the database is held"),
        ({"after": replace(STORED, connections=1)}, "1 connections left"),
        ({"launches": (LAUNCH,) * 3}, "2 launches more than undisturbed"),
        ({"files": frozenset({"work/study.db", "tmp/dsat-x/file"})}, "left: tmp/dsat-x/file"),
        ({"files": frozenset({"work/study.db", "work/optuna-dsat-output/s/trial-0000/.a.json.7"})}, "left: work/"),
        ({"files": frozenset()}, "missing: ['work/study.db']"),
        ({"processes": ("7 sleep",)}, "process left: 7 sleep"),
        ({"result": {"value": 2.0}}, "other result: value is 2.0, was 1.0"),
        ({"result": None}, "no result was printed"),
    ],
)
def test_each_violation_is_found(changes: dict[str, Any], found: str) -> None:
    assert any(found in violation for violation in violations(replace(KILL, **changes), UNDISTURBED, budget=1))


def test_one_launch_in_flight_may_be_repeated_and_its_folder_stays() -> None:
    files = frozenset({"work/study.db", "work/optuna-dsat-output/s/profile.old-1/ds_config.json"})
    again = replace(KILL, launches=(LAUNCH, *UNDISTURBED.launches), files=files)
    assert violations(again, UNDISTURBED, budget=1) == []


def test_the_users_own_folder_may_stay_empty_and_nothing_may_stay_in_it() -> None:
    empty = replace(KILL, files=KILL.files | {"tmp/optuna-dsat-0/launches/"})
    assert violations(empty, UNDISTURBED, budget=1) == []
    assert violations(replace(empty, files=KILL.files | {"tmp/optuna-dsat-0/launches/a.lock"}), UNDISTURBED, budget=1)


def test_a_disk_that_is_full_may_end_the_command_with_its_own_code_and_a_lock_may_not() -> None:
    full = replace(KILL, blow=Blow.DISK_FULL, first=replace(WELL, code=5, stderr="one line"))
    assert violations(full, UNDISTURBED, budget=1) == []
    assert violations(replace(full, blow=Blow.LOCKED), UNDISTURBED, budget=1)


def test_a_launch_that_ended_before_its_database_failed_is_stored_or_kept() -> None:
    failed = replace(
        KILL,
        blow=Blow.READ_ONLY,
        first=replace(WELL, code=5, stderr="one line"),
        between=Observed(studies=("s",)),
        launches_of_first=UNDISTURBED.launches,
    )
    assert violations(failed, UNDISTURBED, budget=1) == ["ended, neither stored nor kept: trial-0000"]
    assert violations(replace(failed, between=STORED), UNDISTURBED, budget=1) == []
    assert violations(replace(failed, launches_of_first=(LAUNCH,)), UNDISTURBED, budget=1) == []
    kept = KILL.files | {"work/optuna-dsat-output/s/kept_results.json"}
    assert violations(replace(failed, kept=frozenset({"trial-0000"}), files=kept), UNDISTURBED, budget=1) == []
    assert violations(replace(KILL, files=kept), UNDISTURBED, budget=1), "a killed one leaves no such file"


def strikes_of(*whats: str) -> list[Strike]:
    points = tuple(Point(kind="file", what=f"create {what}", site="a.py:f+1") for what in whats)
    return all_strikes({CASE: Reference(points=points, aftermath=UNDISTURBED)}, [Blow.KILL, Blow.DISK_FULL])


def test_the_passes_of_a_loop_are_one_place_of_which_the_first_and_the_last_are_tried() -> None:
    strikes = strikes_of(*(f"trial-{number:04d}" for number in range(9)), "best.json")
    kept = distinct(strikes, times=3)
    for blow in (Blow.KILL, Blow.DISK_FULL):
        assert [strike.number for strike in kept if strike.blow is blow] == [0, 4, 8, 9]
    assert distinct(strikes, times=9) == strikes
    elsewhere = replace(strikes[0], point=replace(strikes[0].point, site="a.py:f+2"))
    assert elsewhere in distinct([*strikes, elsewhere], times=2), "another line is another place"


def test_methods_share_places_but_for_kills() -> None:
    other = Case(method="binary", database="sqlite")
    strikes = [replace(item, case=case) for case in (CASE, other) for item in strikes_of(*"0123")]
    kept = distinct(strikes, times=2)
    assert [(item.case, item.number) for item in kept if item.blow is Blow.KILL] == [
        *((CASE, number) for number in (0, 3)),
        *((other, number) for number in (0, 3)),
    ]
    assert [(item.case, item.number) for item in kept if item.blow is Blow.DISK_FULL] == [(CASE, 0), (other, 3)]


def test_a_sample_is_drawn_by_its_seed() -> None:
    strikes = strikes_of(*"abcdefgh")
    assert drawn(strikes, seed=1, sample=4) == drawn(strikes, seed=1, sample=None)[:4]
    assert drawn(strikes, seed=1, sample=None) != drawn(strikes, seed=2, sample=None)


def test_an_order_meets_all_code_before_it_meets_any_again() -> None:
    often = [item for item in strikes_of(*(["a"] * 20), "b") if item.blow is Blow.KILL]
    sites = [f"x.py:f+{line} < x.py:g+1" for line in range(20)] + ["x.py:h+1"]
    strikes = [replace(item, point=replace(item.point, site=site)) for item, site in zip(often, sites, strict=True)]
    for seed in range(10):
        order = drawn(strikes, seed=seed, sample=None)
        assert {item.point.code for item in order[:2]} == {strike.point.code for strike in strikes}
        assert sorted(item.point.site for item in order) == sorted(sites)


def test_a_later_run_goes_on_with_the_results_of_an_earlier_one(tmp_path: Path) -> None:
    first, again = strikes_of("a.17", "b.17"), strikes_of("a.18", "b.18", "c")
    results = Results(tmp_path / "results.jsonl")
    tried = Tried(
        number=0,
        point=first[0].point,
        blow=Blow.KILL,
        first_code=-9,
        second_code=0,
        violations=("left: x",),
        seconds=0.5,
        cpu_s=0.4,
    )
    results.add(CASE, tried)
    results.add(CASE, replace(tried, violations=()))
    assert results.of(again) == {again[0]: replace(tried, violations=())}, "the last one, whatever the process's number"
    moved = [replace(item, point=replace(item.point, site="a.py:f+2")) for item in again]
    assert results.of(moved) == {}, "other code is tried anew"


def test_what_befalls_a_point_follows_its_kind_and_database() -> None:
    def kinds(point: Point, database: str) -> set[str]:
        return {blow.name for blow in Blow if applies(blow, point, database=database)}

    statement, commit = Point(kind="statement", what="INSERT INTO x"), Point(kind="commit", what="COMMIT")
    of_all = {"KILL", "DISK_FULL", "IO_ERROR", "LOCKED", "READ_ONLY"}
    assert kinds(statement, "sqlite") == of_all
    assert kinds(statement, "postgres") == of_all | {"CUT"}
    assert kinds(commit, "postgres") == of_all | {"CUT", "CUT_AFTER"}
    assert kinds(Point(kind="file", what="create x"), "sqlite") == {"KILL", "DISK_FULL", "IO_ERROR"}
    assert kinds(Point(kind="file", what="rename x"), "sqlite") == {"KILL", "IO_ERROR"}
    assert kinds(Point(kind="process", what="start"), "sqlite") == {"KILL"}
