"""A clock that is set during a launch changes neither its measured durations nor the order of its events."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.classify import classify
from optuna_dsat.launch.launch import Launch
from optuna_dsat.launch.machine.processes import new_mark
from optuna_dsat.launch.reports import report_of
from optuna_dsat.runtime.agent.processes import MARK_ENV
from optuna_dsat.runtime.events import Event, EventWriter, RankFinished, RankStarted
from tests.harness.events import step_of
from tests.harness.launches import followed, processes_of

HOURS_S = 5 * 3600.0


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Give a launch that began ten seconds ago."""
    mark = new_mark()
    agent = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: mark})
    started, started_unix = time.monotonic() - 10.0, time.time() - 10.0
    launch = followed(tmp_path, agent, mark, started=started, started_unix=started_unix)
    yield launch
    processes_of(launch).close()


@pytest.mark.parametrize("by_s", [HOURS_S, -HOURS_S])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_launch_takes_what_it_took(launch: Launch, monkeypatch: pytest.MonkeyPatch, by_s: float, after: int) -> None:
    """It is set before its first step, between its steps, or when all have ended."""
    clock, begun = time.time, launch.started
    written = EventWriter(launch.directory.events(0))
    read: list[Event] = []
    for number, second in ((1, 4.0), (2, 6.0)):
        at = launch.started_unix + second + (by_s if number > after else 0.0)
        events: list[Event] = [step_of(step=number, time=at, latency_s=0.1)]
        if number == 1:
            events = [RankStarted(rank=0, time=at, local_rank=0, world_size=1, pid=os.getpid()), *events]
        for event in events:
            written.write(event)
        read += launch.advance(begun + second)
    monkeypatch.setattr(time, "time", lambda: clock() + by_s)
    facts = launch.facts()
    report = report_of(launch, facts, classify(facts), note="", exit_s=0.0)
    assert report.startup_s == pytest.approx(4.0, abs=0.1)
    assert report.measured_s == pytest.approx(2.0, abs=0.1)


def test_a_rank_s_events_stay_in_their_order(launch: Launch) -> None:
    now = time.time()
    events = [
        step_of(step=1, time=now),
        step_of(step=2, time=now - HOURS_S),
        RankFinished(rank=0, time=now, reason="profile_done", steps=2),
    ]
    written = EventWriter(launch.directory.events(0))
    for event in events:
        written.write(event)
    assert launch.advance(time.monotonic()) == events
