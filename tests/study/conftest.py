from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from benchmarks.ours import quick_store
from optuna_dsat.store import Store
from tests.harness.studies import StudyBench


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StudyBench]:
    """Return a bench on a new database.

    Where the test's module has ``IN_THE_DATABASE``, names of tests, trials of the others are in memory: half the time.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (tmp_path / "train.py").write_text("")
    names = getattr(request.module, "IN_THE_DATABASE", None)
    real = names is None or request.function.__name__ in names
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") if real else quick_store(tmp_path) as store:
        yield StudyBench(tmp_path, store)
