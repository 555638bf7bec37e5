"""A study whose tuners are batch jobs, by the script of the docs: they come and go, and the study stays whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optuna_dsat.trials import attributes
from tests.harness.commands import OPTIONS, ROOT, SCRIPT, write_config
from tests.harness.slurm import SlurmCluster
from tests.harness.workers import StoredStudy, wait_until

pytestmark = pytest.mark.torchrun

JOB = ROOT / "examples" / "slurm" / "job.sh"
BUDGET = 3
HELD = """import os, time
while os.path.exists("hold"):
    time.sleep(0.05)
"""
"""Beginning of a training that goes on once a file is gone."""


class Jobs:
    """Batch jobs on a SLURM that run ``optuna-dsat`` by the script of the docs.

    Args:
        slurm: Runs them.
        folder: Their working directory.
    """

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self._slurm, self._folder = slurm, folder
        self.storage = f"sqlite:///{folder / 'study.db'}"
        command = folder / "bin" / "optuna-dsat"
        command.parent.mkdir()
        command.write_text(f"""#!/bin/sh\nexec {sys.executable} -c 'from optuna_dsat.cli import main; main()' "$@"\n""")
        command.chmod(0o755)
        own = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OPTUNA_DSAT_STORAGE": self.storage}
        path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
        self._environ = {**os.environ, **slurm.environ, **own, "OMP_NUM_THREADS": "1", "PATH": path}

    def submit(self, *words: str) -> str:
        """Submit a job; return its number."""
        command = ["sbatch", "--parsable", str(JOB), *words]
        done = subprocess.run(
            command, cwd=self._folder, env=self._environ, stdout=subprocess.PIPE, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return what SLURM knows of a job."""
        return self._slurm.ask("scontrol", "show", "job", job)

    def is_queued_again(self, job: str) -> bool:
        """Return whether a job that has run waits to be run again."""
        return all(words in self.state(job) for words in ("JobState=PENDING", "Restarts=1"))

    def output(self, job: str) -> str:
        """Return what a job wrote."""
        path = self._folder / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""


def in_flight(folder: Path) -> int:
    """Return how many launches of trials have begun and have no report."""
    begun = [path.parents[1] for path in folder.glob("trial-*/events/rank0.jsonl")]
    return sum(not (item / "report.json").exists() for item in begun)


def test_jobs_that_are_requeued_and_cancelled_in_mid_launch_leave_a_whole_study(
    patient_slurm: SlurmCluster, tmp_path: Path
) -> None:
    slurm, jobs = patient_slurm, Jobs(patient_slurm, tmp_path)
    write_config(tmp_path)
    (tmp_path / "train.py").write_text(HELD + SCRIPT.read_text())
    folder, hold = tmp_path / "optuna-dsat-output" / "s", tmp_path / "hold"
    wide = ("--zero-stages", "2")  # one rank has two configurations at stage 1
    how = ("--study", "s", "--max-trials", str(BUDGET), *OPTIONS, *wide, "--", "ds.json", "0.01")
    first = jobs.submit("binary", "train.py", "ds.json", *how)
    wait_until((folder / "profile" / "command.txt").exists, what="the study is begun")
    worker = jobs.submit("worker", "s")
    wait_until((folder / "profile" / "report.json").exists, what="the script is profiled")
    hold.touch()
    wait_until(lambda: in_flight(folder) == 2, what="both jobs are in the middle of a launch")

    slurm.ask("scontrol", "requeue", first)
    wait_until(lambda: jobs.is_queued_again(first), what="the job is queued again")
    slurm.ask("scancel", worker)
    wait_until(lambda: not slurm.tasks(), what="no process is left on the nodes")
    wait_until(lambda: "JobState=CANCELLED" in jobs.state(worker), what="the other job is cancelled")
    hold.unlink()
    slurm.ask("scontrol", "update", f"jobid={first}", "StartTime=now")  # SLURM itself lets it wait for two minutes
    wait_until(lambda: not slurm.jobs, what="the study is searched to its end")

    assert "JobState=COMPLETED" in jobs.state(first), jobs.output(first)
    assert (folder / "best_ds_config.json").exists()
    stored = StoredStudy.read(jobs.storage, "s")
    stored.check_whole(budget=BUDGET)
    reasons = [trial.user_attrs[attributes.MESSAGE] for trial in stored.lost]
    assert len(reasons) >= 2
    assert all("the search was stopped" in reason for reason in reasons), reasons
    assert not slurm.tasks()
