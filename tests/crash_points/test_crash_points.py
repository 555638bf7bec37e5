"""A sample of all crash points, and what the checks find when something is wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.crash_points.checks import Aftermath, violations
from tests.crash_points.command import Ended
from tests.crash_points.launcher import Launched
from tests.crash_points.observed import Observed, StoredTrial
from tests.crash_points.points import Blow
from tests.crash_points.runs import DATABASES, METHODS, SEED
from tests.harness.databases import EXTERNAL

ROOT = Path(__file__).parents[2]
SAMPLE = 4
"""Blows of a run of the suite; ``make crash-points`` tries all."""
LIMIT_S = 600.0

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
    files=frozenset({"work/study.db"}),
    processes=(),
    result={"value": 1.0},
)
KILL = replace(UNDISTURBED, blow=Blow.KILL, first=KILLED, second=WELL)


@pytest.mark.postgres
def test_a_sample_of_all_points(request: pytest.FixtureRequest) -> None:
    """Try points of one method on one database, all drawn by a seed, which is printed; the environment may give it."""
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(10**6))
    number, method = divmod(seed, len(METHODS))
    database = DATABASES[number % len(DATABASES)]
    server = {EXTERNAL: request.getfixturevalue("postgres_server").url} if database == "postgres" else {}
    chosen = ("--methods", METHODS[method], "--databases", database, "--sample", str(SAMPLE), "--seed", str(seed))
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash_points", "--jobs", "1", *chosen],
        cwd=ROOT,
        env={**os.environ, **server},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEED}={seed}" in done.stdout
    assert f"{SAMPLE} blows, 0 with violations" in done.stdout


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


def test_a_disk_that_is_full_may_end_the_command_with_its_own_code_and_a_lock_may_not() -> None:
    full = replace(KILL, blow=Blow.DISK_FULL, first=replace(WELL, code=5, stderr="one line"))
    assert violations(full, UNDISTURBED, budget=1) == []
    assert violations(replace(full, blow=Blow.LOCKED), UNDISTURBED, budget=1)
