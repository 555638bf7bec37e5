"""What a study records of the machine and software that it was started with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from optuna_dsat.launch.machine import devices as devices_module
from optuna_dsat.launch.machine.devices import environment_of
from tests.harness.nvml_machine import Machine, uuid
from tests.harness.simulated import SIMULATED_DEVICES


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_the_scripts_folder_is_recorded_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert "commit" not in environment_of(tmp_path, None, on="here", devices=None)
    git(tmp_path, "init", "-q")
    assert "commit" not in environment_of(tmp_path, None, on="here", devices=None)
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    os.utime(tmp_path / "train.py", (0, 0))  # the index is not up to date, and is not the tuner's to write
    index = (tmp_path / ".git" / "index").stat()
    assert environment_of(tmp_path, None, on="here", devices=None)["commit"] == commit
    assert (tmp_path / ".git" / "index").stat().st_mtime_ns == index.st_mtime_ns
    (tmp_path / "train.py").write_text("changed = True\n")
    assert environment_of(tmp_path, None, on="here", devices=None)["commit"] == f"{commit}-dirty"


def test_versions_are_those_of_the_scripts_python(tmp_path: Path) -> None:
    facts = environment_of(tmp_path, None, on="here", devices=SIMULATED_DEVICES)
    assert facts["torch"] == torch.__version__
    assert facts.get("cuda") == torch.version.cuda


def test_driver_and_clocks_are_those_of_the_first_gpu_and_unknown_for_a_cluster(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.has(f"gpu {uuid(0)} 81559 4 NVIDIA H100", f"gpu {uuid(1)} 81559 4 NVIDIA H100")
    monkeypatch.setattr(devices_module, "Nvml", machine.nvml)
    facts = environment_of(tmp_path, None, on="here", devices=machine.detect())
    assert facts["driver"] == "580.00"
    assert facts["clocks"].startswith("SM up to 1980 MHz")
    assert "driver" not in environment_of(tmp_path, None, on="ray", devices=machine.detect())
