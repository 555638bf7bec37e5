"""A study over a simulated landscape with logs of its launches, and the dashboard's command."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optuna_dsat.report.view import StudyView, read_view
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.stored import record_of
from optuna_dsat.tuning.run import fill_dashboard
from tests.harness.simulated import Landscape
from tests.harness.studies import StudyBench


class ReportedStudyBench(StudyBench):
    """A bench whose study has logs like real launches."""

    def run(self, spec: StudySpec, landscape: Landscape, *, slots: int = 2, noise: float = 0.0) -> StudyResult:
        result = super().run(spec, landscape, slots=slots, noise=noise)
        fill_dashboard(self.store, spec.name, self.news.append)  # as a run by the commands does
        return result

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder / 'study.db'}"

    def view(self, name: str = "s") -> StudyView:
        return read_view(self.store, name)

    def log(self, launch_id: str, rank: int = 0) -> Path:
        return self.folder / "out" / "s" / launch_id / "logs" / f"rank{rank}.stderr.log"

    def write_logs(self) -> None:
        record = record_of(self.store, "s")
        for row in self.store.launches(record.uuid):
            for rank in (0, 1):
                path = self.log(row.report.launch_id, rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{row.report.launch_id} rank {rank}\n")
            path.with_name("rank0.stdout.log").write_text("")


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield its process and the last address that it prints. Ctrl-C must end it cleanly."""
    command = [sys.executable, "-c", "from optuna_dsat.cli import main; main()", "dashboard", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = 2 if "--optuna-dashboard" in args else 1
        address = [process.stdout.readline().strip() for _ in range(lines)][-1]
        try:
            yield process, address
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
