from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_dsat.launch.simulated import SimulatedResult
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.store import Store
from tests.study.conftest import Bench
from tests.study.landscapes import Hill


def odd_batches_fail(config: Mapping[str, Any]) -> SimulatedResult | None:
    if config["train_micro_batch_size_per_gpu"] in (39, 51):
        return SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=4.0, message="ValueError: batch | odd")
    return None


class Reported(Bench):
    """A bench whose study left the logs that real launches leave."""

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder / 'study.db'}"

    def view(self, name: str = "s") -> StudyView:
        return read_view(self.store, name)

    def log(self, launch_id: str, rank: int = 0) -> Path:
        return self.folder / "out" / "s" / launch_id / "logs" / f"rank{rank}.stderr.log"

    def write_logs(self) -> None:
        record = self.store.find_study("s")
        assert record is not None
        for row in self.store.launches(record.uuid):
            for rank in (0, 1):
                path = self.log(row.report.launch_id, rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{row.report.launch_id} rank {rank}\n")
            path.with_name("rank0.stdout.log").write_text("")


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield its process and the address it prints. Ctrl-C must end it cleanly."""
    command = [sys.executable, "-c", "from optuna_dsat.cli import main; main()", "dashboard", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            yield process, address
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Reported]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (tmp_path / "train.py").write_text("")
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as store:
        yield Reported(tmp_path, store)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study by bisection that met out of memory and errors of the script; not to be changed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = tmp_path_factory.mktemp("template")
    (folder / "train.py").write_text("")
    with Store.open(f"sqlite:///{folder / 'study.db'}") as store:
        bench = Reported(folder, store)
        spec = bench.spec(method="binary", max_trials=16, options={"search_range_factor": 2.0})
        bench.run(spec, Hill(override=odd_batches_fail), slots=4, noise=0.02)
        bench.write_logs()
    return folder


@pytest.fixture(scope="session")
def view(template: Path) -> StudyView:
    with Store.open(f"sqlite:///{template / 'study.db'}") as store:
        return read_view(store, "s")


@pytest.fixture
def finished(template: Path, tmp_path: Path) -> Iterator[Reported]:
    """A copy of the finished study, files and all, to be changed at will."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    with Store.open(f"sqlite:///{tmp_path / 'study.db'}") as store:
        bench = Reported(tmp_path, store)
        record = store.find_study("s")
        assert record is not None
        store.update_spec(record.uuid, {**record.spec, "output_dir": str(tmp_path / "out")})
        yield bench
