from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_dsat.outcome import Outcome
from optuna_dsat.report.page import render
from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.store import Store
from optuna_dsat.study.stored import record_of
from tests.harness.landscapes import Hill
from tests.harness.reports import ReportedStudyBench
from tests.harness.simulated import SimulatedResult


def odd_batches_fail(config: Mapping[str, Any]) -> SimulatedResult | None:
    if config["train_micro_batch_size_per_gpu"] == 37:
        return SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=4.0, message="ValueError: batch | odd")
    return None


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ReportedStudyBench]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (tmp_path / "train.py").write_text("")
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as store:
        yield ReportedStudyBench(tmp_path, store)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study by bisection that met out of memory and errors of the script; not to be changed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = tmp_path_factory.mktemp("template")
    (folder / "train.py").write_text("")
    with Store.open(f"sqlite:///{folder / 'study.db'}") as store:
        bench = ReportedStudyBench(folder, store)
        spec = bench.spec(method="binary", max_trials=16, options={"search_range_factor": 2.0})
        bench.run(spec, Hill(override=odd_batches_fail), slots=4, noise=0.02)
        bench.write_logs()
    return folder


@pytest.fixture(scope="session")
def view(template: Path) -> StudyView:
    with Store.open(f"sqlite:///{template / 'study.db'}") as store:
        return read_view(store, "s")


@pytest.fixture(scope="session")
def rendered(view: StudyView) -> str:
    """The page of that study."""
    return render(view)


@pytest.fixture
def finished(template: Path, tmp_path: Path) -> Iterator[ReportedStudyBench]:
    """A copy of the finished study, files and all, to be changed at will."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as store:
        bench = ReportedStudyBench(tmp_path, store)
        record = record_of(store, "s")
        store.update_spec(record.uuid, {**record.spec, "output_dir": str(tmp_path / "out")})
        yield bench
