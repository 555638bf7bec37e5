from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from benchmarks.ours import quick_store
from optuna_dsat.store import Store
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.stored import read_stored
from tests.harness.landscapes import Hill
from tests.harness.studies import StudyBench

ZERO_3_KNOBS = (
    *("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_param_persistence_threshold", "sub_group_size"),
)
"""Knobs that most studies leave out: they choose among some hundred configurations, not ten thousand, which takes a
third less time.
"""


class SmallBench(StudyBench):
    """Runs studies that do not search ``ZERO_3_KNOBS``, unless they say what they do not search."""

    def spec(self, **changes: Any) -> StudySpec:
        return super().spec(**{"no_tune": ZERO_3_KNOBS, **changes})


@pytest.fixture
def in_sqlite() -> None:
    """Have the bench's trials in SQLite, where other stores see them; in memory a study takes half the time."""


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, migrated: Path) -> Iterator[StudyBench]:
    """Return a bench on a new database, whose trials are in memory unless the test uses ``in_sqlite``."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (tmp_path / "train.py").write_text("")
    shutil.copy(migrated, tmp_path / "study.db")
    real = "in_sqlite" in request.fixturenames
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") if real else quick_store(tmp_path) as store:
        yield SmallBench(tmp_path, store)


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """Return the profile that a study over the hill stores."""
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "train.py").write_text("")
    with quick_store(folder) as store:
        bench = SmallBench(folder, store)
        bench.run(bench.spec(max_trials=1, confirm=0), Hill())
        result = read_stored(store, "s").profiled
    assert result is not None
    return result
