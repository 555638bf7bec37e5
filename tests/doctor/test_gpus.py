"""The doctor's findings on faulty GPUs, other vendors' devices and the CUDA toolkit."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.doctor import examination, probe
from optuna_dsat.doctor.finding import Finding, Status, exit_code
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine import devices as accelerators
from optuna_dsat.launch.machine.devices import detect_devices, refuse_build
from optuna_dsat.script.interpreter import examined
from tests.doctor import test_doctor
from tests.harness.nvml_machine import GPU_IS_LOST, Machine, machine, nvml_libraries

__all__ = ["machine", "nvml_libraries"]

TOOLKIT: dict[str, Any] = {"home": "/opt/cuda", "version": "12.4", "why_not": ""}


def look(machine: Machine, torch: dict[str, Any] | None = None, **environ: str) -> dict[str, Finding]:
    return test_doctor.look(machine, found=test_doctor.told(torch), environ=environ)


def test_a_lost_gpu_is_a_problem_and_not_a_hidden_one(machine: Machine) -> None:
    machine.gpus(3)
    machine.gets(f"refuse nvmlDeviceGetMemoryInfo {GPU_IS_LOST} 1")
    result = look(machine)
    assert {"gpu 0", "gpu 2"} <= result.keys()
    assert "gpu 1" not in result
    assert "hidden GPUs" not in result
    assert result["notice 1"].status is Status.PROBLEM
    assert result["notice 1"].text.startswith("GPU 1 is left out, it does not answer")
    assert exit_code(list(result.values())) == 0


def test_a_holder_is_named(machine: Machine) -> None:
    machine.gets(f"process 1 compute {os.getpid()} 5120")
    text = look(machine)["gpu 1"].text
    assert f"in use by process {os.getpid()} (" in text
    assert "5.00 GiB" in text


def test_what_cuda_ignores_of_the_variable_is_told(machine: Machine) -> None:
    result = look(machine, CUDA_VISIBLE_DEVICES="1,1")
    assert "counts once" in result["notice 1"].text
    assert result["hidden GPUs"].data == {"count": 1}


@pytest.mark.parametrize(
    ("toolkit", "status", "said"),
    [
        (TOOLKIT, Status.FINE, "nvcc 12.4 (/opt/cuda)"),
        ({**TOOLKIT, "version": "13.0"}, Status.PROBLEM, "is of CUDA 13.0, torch of 12.8"),
        ({**TOOLKIT, "version": None, "why_not": "no CUDA toolkit"}, Status.PROBLEM, "cannot be compiled: no CUDA"),
    ],
)
def test_the_compiler_of_operators_is_looked_for(
    machine: Machine, toolkit: dict[str, Any], status: Status, said: str
) -> None:
    result = look(machine, {"toolkit": toolkit})["nvcc"]
    assert (result.status, said in result.text) == (status, True)
    assert ("CUDA toolkit 12.8" in result.remedy) is (status is Status.PROBLEM)
    assert "nvcc" not in look(machine, {"toolkit": toolkit}, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize(
    ("script", "version", "why_not"),
    [
        ("echo 'Cuda compilation tools, release 13.0, V13.0.88'", "13.0", ""),
        ("echo nothing", None, "nvcc tells no version"),
        (None, None, "FileNotFoundError"),
    ],
)
def test_the_probe_asks_nvcc_where_torch_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, version: str | None, why_not: str
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    if script is not None:
        nvcc.write_text(f"#!/bin/sh\n{script}\n")
        nvcc.chmod(0o755)
    for name in ("torch", "torch.utils"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    extension = SimpleNamespace(CUDA_HOME=str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", extension)
    result = probe._toolkit()
    assert (result["home"], result["version"]) == (str(tmp_path), version)
    assert result["why_not"].startswith(why_not)
    extension.CUDA_HOME = None
    assert "no CUDA toolkit" in probe._toolkit()["why_not"]


@pytest.mark.parametrize(("version", "maker"), [("2.9.0.dev1+rocm7.0.0.lw", "AMD GPUs"), ("2.9.0+xpu", "Intel")])
def test_a_torch_for_other_gpus_is_refused_and_says_what_is_supported(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, version: str, maker: str
) -> None:
    for other in ("2.13.0+cpu", "2.6.0a0+ecf3bae40a.nv25.01"):
        refuse_build(other)  # raises nothing
    with pytest.raises(UsageError, match=rf"is a build for {maker}.*NVIDIA GPUs.*--cpu-ranks"):
        refuse_build(version)
    installation = replace(examined(sys.executable), versions={"torch": version, "deepspeed": "0.19.8"})
    monkeypatch.setattr(examination, "examined", lambda _: installation)
    result = look(machine)
    assert result["accelerator"].status is Status.PROBLEM
    assert maker in result["accelerator"].text
    assert "--cpu-ranks" in result["accelerator"].remedy


def test_an_accelerator_that_deepspeed_knows_and_we_do_not_is_refused(machine: Machine) -> None:
    with pytest.raises(UsageError, match="DS_ACCELERATOR is 'xpu'"):
        detect_devices(environ={"DS_ACCELERATOR": "xpu"}, nvml=machine.nvml())
    assert detect_devices(environ={"DS_ACCELERATOR": "cuda"}, nvml=machine.nvml()).kind == "cuda"


@pytest.mark.parametrize(("node", "said"), [("kfd", "AMD"), ("nvgpu", "Jetson")])
def test_another_makers_gpu_is_a_notice_where_launches_run_on_the_cpu(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, said: str
) -> None:
    (tmp_path / node).touch()
    monkeypatch.setattr(accelerators, "_DEV", tmp_path)
    assert machine.detect().notices == ()
    machine.has()
    assert said in machine.detect().notices[-1]
    assert said in look(machine)["notice 2"].text
