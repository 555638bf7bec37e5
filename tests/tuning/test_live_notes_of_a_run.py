"""A run notes its launches where another process reads them, from its profile to its last finalist."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from optuna_dsat.store import Store
from optuna_dsat.study.live_state import LiveState, read_states
from tests.harness.entry_points import EntryPointBench, Run, bench, run_here
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedProfile, SimulatedResult

__all__ = ["bench", "run_here"]


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
