from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from optuna_dsat.store import Store
from tests.harness.studies import StudyBench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[StudyBench]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (tmp_path / "train.py").write_text("")
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as store:
        yield StudyBench(tmp_path, store)
