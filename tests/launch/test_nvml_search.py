"""How a search detects a machine's GPUs before anything is launched."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.full_run import run_full
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import RandomOptions
from optuna_dsat.tuning.prepare import Prepared, prepare
from tests.harness.entry_points import leave
from tests.harness.nvml_machine import GPU_IS_LOST, Machine

PARTS = [f"MIG-{letter}0000000-1111-2222-3333-444444444444" for letter in "ab"]


@pytest.fixture(autouse=True)
def nothing_but_this_machine(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # location of the lock files
    monkeypatch.setitem(sys.modules, "pynvml", machine.pynvml())
    machine.gpus(4)


def prepared(**options: Any) -> Prepared:
    asked = RandomOptions(script=Path("train.py"), ds_config=Path("ds.json"), **options)
    return prepare("random", Given(options=asked))


def test_a_search_takes_all_gpus_that_answer_and_names_the_others(machine: Machine) -> None:
    assert prepared().request.spec.slots_per_trial == 4
    machine.gets(f"refuse nvmlDeviceGetMemoryInfo {GPU_IS_LOST} 2")
    result = prepared()
    assert (result.request.spec.slots_per_trial, result.request.devices.indices) == (3, (0, 1, 3))
    assert [note.partition(",")[0] for note in result.notes] == ["GPU 2 is left out"]
    with pytest.raises(UsageError, match=r"--gpus-per-trial is 4, but this machine offers 3 GPUs.*GPU 2 is left out"):
        prepared(gpus_per_trial=4)


def test_only_free_gpus_decide_how_many_a_launch_takes(machine: Machine) -> None:
    machine.gets(f"process 1 compute {os.getpid()} 4000")
    assert prepared().request.spec.slots_per_trial == 4
    result = prepared(only_free_gpus=True)
    assert (result.request.spec.slots_per_trial, result.request.devices.indices) == (3, (0, 2, 3))
    assert "Not free: GPU 1: process" in result.notes[0]
    assert prepared(only_free_gpus=True, gpus_per_trial=2).request.spec.slots_per_trial == 2
    with pytest.raises(UsageError, match="offers 3 GPUs"):
        prepared(only_free_gpus=True, gpus_per_trial=4)
    assert prepared(only_free_gpus=True, cpu_ranks=2).request.spec.device == "cpu"


def test_a_launch_takes_one_part_of_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gets(*(f"gpu {part} 9856 12 NVIDIA H100 80GB HBM3 MIG 1g.10gb" for part in PARTS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(PARTS))
    result = prepared()
    assert (result.request.spec.slots_per_trial, len(result.request.devices.devices)) == (1, 2)
    with pytest.raises(UsageError, match="--gpus-per-trial is 2, but a launch can take 1 GPU"):
        prepared(gpus_per_trial=2)


def test_the_limit_of_the_wait_is_stored_and_changes_no_study() -> None:
    spec = prepared(wait_for_gpus=30.0).request.spec
    assert spec.wait_for_gpus == 30.0
    assert spec.identity() == prepared().request.spec.identity()
    with pytest.raises(UsageError, match="--wait-for-gpus is -1"):
        prepared(wait_for_gpus=-1.0)


def test_the_command_says_what_is_odd_about_the_devices(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.gets(f"refuse nvmlDeviceGetMemoryInfo {GPU_IS_LOST} 2")
    code = leave("random", "train.py", "ds.json", "--dry-run")
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert shown.err.startswith("GPU 2 is left out, it does not answer")


def test_training_in_the_foreground_waits_no_longer_than_it_may(machine: Machine, tmp_path: Path) -> None:
    machine.gets(f"process 1 compute {os.getpid()} 4000")
    command = ScriptCommand(script="train.py", cwd=str(tmp_path), config_path="ds.json")
    request = LaunchRequest(launch_id="full", purpose="full", command=command, ds_config={}, overlay={}, slots=4)
    with pytest.raises(DeviceError, match="Not free: GPU 1: process"):
        run_full(request, devices=machine.detect(), wait_for_gpus_s=0.0)
