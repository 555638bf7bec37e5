from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.doctor import libraries
from optuna_dsat.doctor.examination import examine, examine_storage
from optuna_dsat.doctor.finding import Finding, Status, exit_code, to_json
from optuna_dsat.doctor.libraries import Libraries
from optuna_dsat.doctor.machine import drive_finding, host_findings
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine import devices as devices_module
from optuna_dsat.launch.machine import nvme as drives
from optuna_dsat.store import Store
from tests.harness.entry_points import leave
from tests.harness.nvml_machine import GPU_IS_LOST, Machine, machine, nvml_libraries, uuid

__all__ = ["machine", "nvml_libraries"]

TORCH: dict[str, Any] = {
    "version": "2.13.0", "cuda": "12.8", "nccl_version": "2.27.3", "cuda_works": True, "cuda_error": "",
    "architectures": ["sm_80", "sm_90", "compute_90"], "capabilities": [(9, 0)],
}  # fmt: skip
WORKS: dict[str, Any] = {"compatible": True, "why_not": ""}
DEEPSPEED: dict[str, Any] = {
    "version": "0.19.8",
    "accelerator": "cuda",
    "backend": "nccl",
    "operators": {"CPUAdamBuilder": WORKS, "AsyncIOBuilder": WORKS},
}


def told(torch: Mapping[str, Any] | None = None, deepspeed: Mapping[str, Any] | None = None) -> Libraries:
    return Libraries(torch={**TORCH, **(torch or {})}, deepspeed={**DEEPSPEED, **(deepspeed or {})})


def look(
    gpus: Machine, *, found: Libraries | None = None, environ: Mapping[str, str] | None = None, **more: Any
) -> dict[str, Finding]:
    folder = gpus.file.parent
    findings = examine(
        output_dir=folder / "out",
        environ={"PATH": os.environ["PATH"], "TORCH_EXTENSIONS_DIR": str(folder), **(environ or {})},
        nvml=gpus.nvml(),
        ask=lambda **_: found or told(),
        **more,
    )
    assert len({(finding.area, finding.name) for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def test_this_machine_can_run_launches_and_nothing_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from optuna_dsat.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as e:\n    code = e.code\n"
        "heavy = {'torch', 'deepspeed'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {code}' if heavy or code else 0)\n"
    )
    command = [sys.executable, "-c", code, "doctor", "--json", "--output-dir", str(tmp_path / "out")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OPTUNA_DSAT_STORAGE": f"sqlite:///{tmp_path}/new.db"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["can_run"] is True
    result = {fact["name"]: fact for fact in facts["findings"]}
    from importlib.metadata import version

    assert result["torch"]["data"]["version"].split("+")[0] == version("torch").split("+")[0]
    assert result["deepspeed"]["data"]["version"].startswith(version("deepspeed").split("+")[0])
    assert result["deepspeed"]["data"]["accelerator"] == "cpu"
    assert result["communication"]["data"]["backend"] == "gloo"
    assert result["launcher"]["data"]["launcher"] == "warm"
    assert "the first study makes it" in result["storage"]["text"]
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_is_named_by_its_folder_and_an_old_one_is_fatal_once(machine: Machine, tmp_path: Path) -> None:
    python = tmp_path / "old" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho \'{"version": [3, 8, 18], "prefix": "/old", "path": [], "versions": {}}\'\n')
    python.chmod(0o755)
    fatal = [
        finding for finding in look(machine, python=str(tmp_path / "old")).values() if finding.status is Status.FATAL
    ]
    assert [finding.name for finding in fatal] == ["interpreter"]
    assert f"{python} is Python 3.8.18; launches need 3.9 or newer." in fatal[0].text
    with pytest.raises(UsageError, match="--python is /gone: there is no such interpreter"):
        look(machine, python="/gone")


def test_gpus_are_named_and_one_in_use_is_a_problem(machine: Machine) -> None:
    machine.has(*(f"gpu {uuid(index)} 81920 {used} H100" for index, used in enumerate((4, 30720, 20480))))
    machine.gets("process 1 compute 4194305 30720")
    result = look(machine)
    assert result["driver"].text == "Driver 580.00"
    assert result["gpu 0"].status is Status.FINE
    assert "H100, 80.00 GiB" in result["gpu 0"].text
    assert result["gpu 1"].status is Status.PROBLEM
    assert "in use by process 4194305 (far-4194305), 30.00 GiB" in result["gpu 1"].text
    assert "a process that NVML does not name" in result["gpu 2"].text
    assert "NCCL 2.27.3" in result["communication"].text
    assert exit_code(list(result.values())) == 0


def test_hidden_gpus_are_told_and_launches_run_on_the_cpu(machine: Machine) -> None:
    result = look(machine, environ={"CUDA_VISIBLE_DEVICES": ""}, found=told({"cuda": None}))
    assert result["hidden GPUs"].text.endswith("hides 2 GPUs of this machine.")
    assert result["cpu"].status is Status.NOTE
    assert result["torch"].status is Status.FINE
    assert "gloo" in result["communication"].text


def test_a_driver_that_does_not_answer_is_fatal(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gets(f"refuse nvmlDeviceGetCount {GPU_IS_LOST}")
    monkeypatch.setattr(devices_module, "_DRIVER", tmp_path)
    result = look(machine)
    assert result["driver"].status is Status.FATAL
    assert "GPU is lost" in result["driver"].text
    assert "CUDA_VISIBLE_DEVICES=" in result["driver"].remedy
    assert exit_code(list(result.values())) == 3


@pytest.mark.parametrize(
    ("torch", "status", "said"),
    [
        ({}, Status.FINE, "built for CUDA 12.8"),
        ({"cuda": None}, Status.FATAL, "it cannot use 2 GPUs"),
        ({"cuda_works": False, "cuda_error": "RuntimeError: driver too old"}, Status.FATAL, "driver too old"),
        ({"capabilities": [(8, 6)]}, Status.FINE, ""),
        ({"capabilities": [(12, 0)]}, Status.FINE, ""),
        ({"capabilities": [(12, 0)], "architectures": ["sm_80", "sm_90"]}, Status.PROBLEM, "compute capability 12.0"),
        ({"capabilities": [(7, 0)]}, Status.PROBLEM, "compute capability 7.0"),
    ],
)
def test_what_torch_cannot_do_is_told(machine: Machine, torch: dict[str, Any], status: Status, said: str) -> None:
    result = look(machine, found=told(torch))["torch"]
    assert result.status is status
    assert said in result.text
    assert bool(result.remedy) == (status is not Status.FINE)


def test_a_broken_installation_is_told_by_its_error_or_by_the_end_of_its_process(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open shared object file\\nmore')\n")
    result = libraries.ask(cpu=True, environ={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert result.torch == {"error": "OSError: libtorch.so: cannot open shared object file"}
    findings = list(libraries.findings(result, gpus=0))
    assert [finding.status for finding in findings] == [Status.FATAL, Status.FATAL]
    assert list(libraries.offloads(result, nvme=None, environ={})) == []
    (tmp_path / "torch.py").write_text("import os\nos.write(2, b'illegal instruction\\n')\nos._exit(132)\n")
    result = libraries.ask(cpu=True, environ={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "exit code 132" in result.torch["error"]


def test_which_offloads_can_work_and_why_not(machine: Machine, tmp_path: Path) -> None:
    names = ("optimizer to the CPU", "to NVMe")
    result = look(machine)
    assert [result[name].status for name in names] == [Status.FINE, Status.NOTE]
    assert "--nvme-path FOLDER" in result["to NVMe"].text
    not_built = {"compatible": False, "why_not": "no nvcc"}
    environ = {"PATH": os.environ["PATH"], "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    broken = told(deepspeed={"operators": {"CPUAdamBuilder": not_built, "AsyncIOBuilder": not_built}})
    result = {finding.name: finding for finding in libraries.offloads(broken, nvme=tmp_path, environ=environ)}
    assert [result[name].status for name in names] == [Status.PROBLEM, Status.PROBLEM]
    assert "(no nvcc)" in result["optimizer to the CPU"].text
    assert "torch_adam" in result["optimizer to the CPU"].remedy
    assert "libaio" in result["to NVMe"].remedy


def test_each_operator_is_built_or_can_be_or_cannot_and_why(machine: Machine, tmp_path: Path) -> None:
    not_built = {"compatible": False, "why_not": "no libaio."}
    result = told(deepspeed={"operators": {**DEEPSPEED["operators"], "AsyncIOBuilder": not_built}})
    library = tmp_path / "py311_cu128" / "fused_adam" / "fused_adam.so"
    library.parent.mkdir(parents=True)
    library.touch()
    findings = look(machine, found=result)
    assert findings["fused_adam"].text == "fused_adam (Adam on the device): built."
    assert findings["cpu_adam"].data["state"] == "can be built"
    assert "may take minutes" in findings["cpu_adam"].text
    assert findings["async_io"].text == "async_io (offload to NVMe): cannot be built, because: no libaio."
    assert findings["async_io"].status is Status.NOTE
    assert "deepspeed_shm_comm" not in findings, "communication on the CPU is of no use to GPUs"
    without = look(machine, found=result, environ={"PATH": str(tmp_path)})
    assert without["cpu_adam"].data["why_not"] == "there is no C++ compiler and no ninja"
    assert without["compiler"].status is Status.PROBLEM
    assert "a C++ compiler and ninja" in without["compiler"].text
    assert without["fused_adam"].data["state"] == "built"
    installed = told(deepspeed={"operators": {"CPUAdamBuilder": {**WORKS, "installed": True}}})
    assert look(machine, found=installed)["cpu_adam"].data["state"] == "built"


def test_a_drive_is_measured_and_nothing_is_left_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, seen = drives._time, []

    def looked(*args: Any, **named: Any) -> float:
        seen.append(list(tmp_path.iterdir()))
        return measured(*args, **named)

    monkeypatch.setattr(drives, "_time", looked)
    result = drive_finding(tmp_path, size_bytes=40 * 2**20)
    assert result.data["size_bytes"] == 40 * 2**20
    assert result.data["read_bytes_per_s"] > 0
    assert "GB/s" in result.text
    assert seen == [[], []], "whoever kills it leaves nothing of a gigabyte either"
    missing = drive_finding(tmp_path / "none")
    assert missing.status is Status.PROBLEM
    assert "not a folder" in missing.text
    result = drive_finding(Path("/dev/shm"), size_bytes=16 * 2**20)
    assert result.status is Status.PROBLEM
    assert "lies in memory" in result.remedy


def test_scarce_shared_memory_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=64 * 2**20, free=60 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    result = {f.name: f for f in host_findings(output_dir=tmp_path, environ={}, shm=tmp_path)}
    assert result["shared memory"].status is Status.PROBLEM
    assert "--shm-size" in result["shared memory"].remedy
    assert result["disk"].status is Status.PROBLEM


def test_an_output_directory_that_cannot_be_written_to_is_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    findings = list(host_findings(output_dir=tmp_path / "file" / "out", environ=dict(os.environ)))
    assert exit_code(findings) == 3
    assert to_json(findings)["can_run"] is False
    monkeypatch.setattr("optuna_dsat.doctor.examination.examine", lambda **_: findings)
    assert leave("doctor") == 3
    shown = capsys.readouterr()
    assert "FATAL" in shown.out
    assert "Give another with --output-dir." in shown.out
    assert "no launch can run" in shown.err


def test_a_database_is_reached_or_its_error_is_told_without_the_password(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    assert "the first study makes it" in examine_storage(url).text
    assert list(tmp_path.iterdir()) == []
    with Store.open(url):
        pass
    assert "its tables are those of this version" in examine_storage(url).text
    (tmp_path / "text.db").write_text("this is no database at all" * 100)
    broken = examine_storage(f"sqlite:///{tmp_path}/text.db")
    assert broken.status is Status.FATAL
    away = examine_storage("postgresql://user:s3cret@127.0.0.1:1/x")
    assert away.status is Status.FATAL
    assert "s3cret" not in json.dumps(to_json([away]))


@pytest.mark.postgres
def test_a_postgres_server_is_reached(postgres_url: str) -> None:
    assert "it holds no study yet" in examine_storage(postgres_url).text


def test_a_script_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("doctor", "no-train.py", "ds_config.json") == 2
    assert "The script no-train.py does not exist." in capsys.readouterr().err
    assert leave("doctor", "-m", "no.module") == 2
    assert "The module no.module was not found" in capsys.readouterr().err
