"""What launches do now stands in the store, and only while their worker is at work."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.errors import StorageError
from optuna_dsat.store import Store
from optuna_dsat.store.leases import Worker, this_worker
from optuna_dsat.study import progress
from optuna_dsat.study.live_state import LaunchInFlight, LiveNotes, LiveState, read_states
from tests.harness.entry_points import EntryPointBench, Run, bench, run_here
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedProfile, SimulatedResult

__all__ = ["bench", "run_here"]

NOW = 1_800_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as result:
        result.create_study("s", {})
        yield result


def put(store: Store, record: Any, key: str = "dsat_live:other") -> None:
    store.storage.set_study_system_attr(store.storage.get_study_id_from_name("s"), key, record)


def note(**changes: Any) -> LiveState:
    row = LaunchInFlight(name="3", words="ZeRO 2", since=NOW, last_step=5)
    result = LiveState(worker=this_worker(), noted_at=NOW, rows={"3": row})
    return replace(result, **changes)


def test_a_profile_and_finalists_are_noted_while_they_run(store: Store) -> None:
    clock: list[float] = [NOW]
    passed: list[progress.ProgressEvent] = []
    notes = LiveNotes(passed.append, study="s", clock=lambda: clock[0])
    events: list[progress.ProgressEvent] = [
        progress.ProfileStarted(words="ZeRO 2"),
        progress.TrialPhase(number=None, words="importing"),
    ]
    notes(events[0])
    assert read_states(store, "s", now=NOW) == [], "no store yet"
    with notes.kept_in(store):
        notes(events[1])
        (result,) = read_states(store, "s", now=NOW)
        assert [(row.name, row.words, row.doing) for row in result.rows.values()] == [
            ("profile", "ZeRO 2, micro-batch 1", "importing")
        ]
        notes(progress.FinalistStarted(number=7, words="ZeRO 3", end_profile_step=9))
        for step, later in ((1, 2.0), (2, 2.2), (3, 4.0)):
            clock[0] = NOW + later
            notes(progress.TrialStepped(number=7, step=step, samples_per_s=40.0, peak_bytes=2**30))
            (result,) = read_states(store, "s", now=NOW)
            assert result.rows["7"].step == (1 if step == 2 else step), "at most once a second"
        assert result.ended_search
        assert (result.rows["7"].doing, result.rows["7"].samples_per_s) == ("step 4 of 9", 40.0)
        notes(progress.Phase(words="building cpu_adam"))
        assert read_states(store, "s", now=NOW)[0].phase == "building cpu_adam"
    assert read_states(store, "s", now=NOW) == []
    assert passed[:2] == events


def test_a_database_that_failed_is_left_alone(store: Store) -> None:
    notes = LiveNotes(lambda _: None, study="s")

    def search() -> None:
        with notes.kept_in(store):
            notes(progress.ProfileStarted(words="ZeRO 2"))
            raise StorageError("gone")

    with pytest.raises(StorageError):
        search()
    assert len(read_states(store, "s", now=NOW)) == 1, "nothing was written after it"


def test_notes_of_the_dead_do_not_count(store: Store) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    dead = Worker(name="x:1", machine=this_worker().machine, pid=ended.pid, pid_started_at=0.0)
    put(store, asdict(note(worker=dead)))
    assert read_states(store, "s", now=NOW) == []
    elsewhere = note(worker=replace(dead, machine="another"))
    put(store, asdict(elsewhere))
    assert read_states(store, "s", now=NOW + 60) == [elsewhere]
    assert read_states(store, "s", now=NOW + 3600) == [], "too old"


@pytest.mark.parametrize("changes", [{"rows": {"3": {"name": "3", "moon": "full"}}}, {"worker": {}}, {"search": 1}])
def test_notes_of_another_version_are_left_out(store: Store, changes: dict[str, Any]) -> None:
    good = note()
    put(store, {**asdict(good), **changes})
    put(store, asdict(good), "dsat_live:good")
    assert read_states(store, "s", now=NOW) == [good]


class Watched(Hill):
    """Reads the notes whenever something is launched."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.seen: list[LiveState] = []

    def read(self) -> list[LiveState]:
        with Store.open(self.url, create=False) as store:
            return read_states(store, "s", now=time.time())

    def profile(self, slots: int) -> SimulatedProfile:
        self.seen += self.read()
        return super().profile(slots)

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        self.seen += self.read()
        return super().run(ds_config, slots)


def test_profile_trials_and_finalists_are_noted_while_they_run(bench: EntryPointBench, run_here: Run) -> None:
    bench.landscape = watched = Watched(f"sqlite:///{bench.folder / 'optuna-dsat.db'}")
    options = ("--cpu-ranks", "1", "--max-trials", "2", "--confirm", "1", "--study", "s", "--quiet")
    done = run_here("random", "train.py", "ds.json", *options)
    assert done.returncode == 0, done.stderr
    names = [row.name for note in watched.seen for row in note.rows.values()]
    assert names[0] == "profile"
    assert "0" in {row.name for note in watched.seen if not note.ended_search for row in note.rows.values()}
    assert [note for note in watched.seen if note.ended_search], "finalists"
    assert watched.read() == [], "it is over"
