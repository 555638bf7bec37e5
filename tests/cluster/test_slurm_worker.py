"""The batch script of the docs makes room when it is told to, and its job is queued again."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.commands import ROOT
from tests.harness.slurm import SlurmCluster
from tests.harness.waits import wait_until

SCRIPT = ROOT / "examples" / "slurm" / "job.sh"
STAND_IN = """#!/bin/bash
echo "$@" >> "$FOLDER/given"
trap 'echo stopped >> "$FOLDER/given"; exit 130' TERM
while [ -z "$ENDS" ]; do sleep 0.05; done
exit "$ENDS"
"""


def submit(slurm: SlurmCluster, folder: Path, *options: str, ends: str) -> str:
    """Submit the script with a stand-in for the command; return the number of its job."""
    command = folder / "optuna-dsat"
    command.write_text(STAND_IN)
    command.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, **slurm.environ, "PATH": path, "FOLDER": str(folder), "ENDS": ends}
    words = ["sbatch", "--parsable", *options, str(SCRIPT), "worker", "llama", "--workdir", "two words"]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def state(slurm: SlurmCluster, job: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", slurm.ask("scontrol", "show", "job", job)))


@pytest.mark.parametrize(("code", "expected"), [("0", "COMPLETED"), ("3", "FAILED")])
def test_a_worker_that_ends_by_itself_ends_its_job(
    slurm: SlurmCluster, tmp_path: Path, code: str, expected: str
) -> None:
    job = submit(slurm, tmp_path, ends=code)
    wait_until(lambda: state(slurm, job).get("JobState") == expected, what=f"the job is {expected}")
    assert state(slurm, job)["Restarts"] == "0"


def test_a_worker_whose_job_is_cancelled_is_stopped_and_does_not_come_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, ends="")
    given = tmp_path / "given"
    wait_until(given.exists, what="the worker runs")
    slurm.ask("scancel", job)
    wait_until(lambda: not slurm.jobs, what="no job is left")
    assert (state(slurm, job)["JobState"], state(slurm, job)["Restarts"]) == ("CANCELLED", "0")
    assert given.read_text().splitlines()[1:] == ["stopped"]
    assert not slurm.tasks()


def test_a_worker_that_slurm_itself_queues_again_is_so_once(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, ends="")
    wait_until((tmp_path / "given").exists, what="the worker runs")
    slurm.ask("scontrol", "requeue", job)
    again = {"Restarts": "1", "JobState": "PENDING"}
    wait_until(lambda: again.items() <= state(slurm, job).items(), what="the job is queued again")
    wait_until(lambda: not slurm.tasks(), what="the worker is gone")
    slurm.ask("scancel", job)
    wait_until(lambda: not slurm.jobs, what="no job is left")


def test_of_an_array_the_worker_that_makes_room_is_queued_again_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--array=1-2", ends="")
    given, worker = tmp_path / "given", "worker llama --workdir two words"
    wait_until(lambda: given.exists() and given.read_text().splitlines() == [worker] * 2, what="both workers run")
    slurm.ask("scancel", "--batch", "--signal=TERM", f"{job}_2")
    again = {"Restarts": "1", "JobState": "PENDING"}
    wait_until(lambda: again.items() <= state(slurm, f"{job}_2").items(), what="one job is queued again")
    assert given.read_text().splitlines() == [worker, worker, "stopped"]
    running = {"Restarts": "0", "JobState": "RUNNING"}
    assert running.items() <= state(slurm, f"{job}_1").items()
    slurm.ask("scancel", job)
    wait_until(lambda: not slurm.jobs, what="no job is left")
