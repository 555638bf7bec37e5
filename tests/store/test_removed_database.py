"""A database that goes away in mid-run is named."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.errors import StorageError
from optuna_dsat.store import Store
from tests.harness.entry_points import EntryPointBench, bench, leave
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedResult

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
def test_a_database_that_goes_away_ends_the_run(
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
    if goes is remove:
        assert not DATABASE.exists(), "nor is an empty one made in its place"


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
