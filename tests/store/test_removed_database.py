"""A database that goes away in mid-run is named, and what was measured is kept."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.errors import StorageError
from optuna_dsat.launch.protocol import Finished, LaunchUpdate
from optuna_dsat.store import Store
from optuna_dsat.tuning import run
from tests.harness.entry_points import EntryPointBench, bench, leave
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher, SimulatedResult

__all__ = ["bench"]

DATABASE = Path("optuna-dsat.db")
SEARCH = shlex.split("random train.py ds.json --cpu-ranks 2 --metric throughput --max-trials 4 --study s --confirm 0")


def remove() -> None:
    for path in Path().glob("optuna-dsat.db*"):
        path.unlink()


def replace() -> None:
    shutil.copy(DATABASE, "copy.db")
    Path("copy.db").rename(DATABASE)


@pytest.mark.parametrize("goes", [remove, replace])
def test_a_database_that_goes_away_ends_the_run_with_what_it_measured(
    bench: EntryPointBench, capsys: pytest.CaptureFixture[str], goes: Any
) -> None:
    launches = []

    def away_at_the_third(_: Mapping[str, Any]) -> SimulatedResult | None:
        launches.append(1)
        if len(launches) == 3:
            goes()
        return None

    bench.landscape = Hill(override=away_at_the_third)
    assert leave(*SEARCH) == 5
    shown = capsys.readouterr().err.strip().splitlines()[-1]
    assert "was removed or replaced while the study ran" in shown
    assert re.search(r"Continue with: optuna-dsat resume \S+$", shown)
    (kept,) = Path().rglob("kept_results.json")
    assert str(kept.resolve()) in shown
    result = json.loads(kept.read_text())["measured"]
    assert result
    assert result[0]["outcome"] == "measured"
    assert result[0]["value"] > 0
    if goes is remove:
        assert not DATABASE.exists(), "nor is an empty one made in its place"


class LosesItsDatabase(SimulatedLauncher):
    """A launcher whose database goes away as a launch ends, before anyone hears of that."""

    ends = "trial-0001"

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        updates = super().poll(timeout_s)
        if any(isinstance(update, Finished) and update.launch_id == self.ends for update in updates):
            remove()
        return updates


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(
    ("ends", "stored", "value"),
    [("profile", [], None), ("trial-0001", [0], float), ("confirm-0000-round-1", [0, 1, 2, 3], float)],
)
def test_a_launch_that_ended_and_could_not_be_stored_is_kept_too(
    monkeypatch: pytest.MonkeyPatch, ends: str, stored: list[int], value: type | None
) -> None:
    def launcher(*_: Any, **__: Any) -> SimulatedLauncher:
        return LosesItsDatabase(Hill(), total_slots=2)

    monkeypatch.setattr(LosesItsDatabase, "ends", ends)
    monkeypatch.setattr(run, "local_launcher", launcher)
    assert leave(*SEARCH[:-1], "1") == 5
    (kept,) = Path().rglob("kept_results.json")
    *before, last = json.loads(kept.read_text())["measured"]
    assert [item["trial"] for item in before if "round" not in item] == stored
    assert not any("stored" in item for item in before)
    assert (last["launch"], last["outcome"], last["stored"]) == (ends, "measured", False)
    assert last["value"] is None if value is None else last["value"] > 0


def test_no_part_of_a_store_goes_on(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'a.db'}") as store:
        store.create_study("s", {"a": 1})
        store.require_present()
        (tmp_path / "a.db").unlink()
        for work in (
            store.list_studies,
            lambda: store.storage.get_all_studies(),
            lambda: store.create_study("t", {"a": 1}),
            lambda: store.exclusively("look", lambda: None),
            store.require_present,
        ):
            with pytest.raises(StorageError, match="was removed or replaced"):
                work()
