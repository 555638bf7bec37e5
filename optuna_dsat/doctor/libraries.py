"""Check torch and DeepSpeed of the script's environment, queried in a subprocess: operators, offloads, launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from optuna_dsat.doctor.finding import Finding, Status, finding_of
from optuna_dsat.doctor.machine import compiler
from optuna_dsat.runtime.agent.forked import can_fork
from optuna_dsat.runtime.agent.operators import ASYNC_IO, COMMUNICATION, is_built, operator_name
from optuna_dsat.script.interpreter import module_command, with_package
from optuna_dsat.words import things_in_words

_PROBE_TIMEOUT_S = 180.0
"""The imports may take a minute on a cold file system."""
_AREA = "software"


@dataclass(frozen=True, kw_only=True)
class Libraries:
    """Results of ``probe``; a package that cannot be imported is a mapping with ``error``."""

    torch: Mapping[str, Any]
    deepspeed: Mapping[str, Any]

    @property
    def usable(self) -> bool:
        """Whether both can be imported."""
        return "error" not in self.torch and "error" not in self.deepspeed

    def operator(self, name: str) -> tuple[bool, str]:
        """Return whether an operator of DeepSpeed can be built, and if not, the reason."""
        result = self.deepspeed.get("operators", {}).get(name, {"compatible": False, "why_not": "not known"})
        return bool(result["compatible"]), str(result["why_not"])

    def is_installed(self, name: str) -> bool:
        """Return whether an operator was installed prebuilt with DeepSpeed."""
        return bool(self.deepspeed.get("operators", {}).get(name, {}).get("installed", False))


def ask(*, cpu: bool, python: str = sys.executable, environ: Mapping[str, str] | None = None) -> Libraries:
    """Query versions and capabilities of torch and DeepSpeed in a subprocess with ``python``; ``cpu``: without GPUs."""
    base = dict(os.environ if environ is None else environ)
    if cpu:
        base.setdefault("DS_ACCELERATOR", "cpu")
    facts = _probed(python=python, environ=base)
    facts = {"torch": facts} if "error" in facts else facts
    return Libraries(torch=facts["torch"], deepspeed=facts.get("deepspeed", {"error": "torch cannot be imported"}))


def _probed(*, python: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the output of ``probe``, run by ``python`` in ``environ``; ``error`` if it ends without output."""
    try:
        done = subprocess.run(
            module_command(python, "optuna_dsat.doctor.probe"),
            env={**environ, "PYTHONPATH": with_package(environ.get("PYTHONPATH"))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
        facts: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch and DeepSpeed took longer than {_PROBE_TIMEOUT_S:g} s"}
    except ValueError:
        last = done.stderr.strip().splitlines()
        return {"error": f"the process that imports it died (exit code {done.returncode}): {last[-1:]}"}
    return facts


def findings(libraries: Libraries, *, gpus: int) -> Iterator[Finding]:
    """Yield the findings on torch, DeepSpeed and the communication backend; ``gpus`` is 0 for the CPU."""
    yield _torch(libraries.torch, gpus)
    yield _deepspeed(libraries.deepspeed)
    if libraries.usable:
        if gpus and "toolkit" in libraries.torch:
            yield _nvcc(libraries.torch)
        yield _communication(libraries.torch, gpus)


def _torch(torch: Mapping[str, Any], gpus: int) -> Finding:
    if "error" in torch:
        text = f"torch cannot be imported: {torch['error']}"
        remedy = "Install torch into the environment of your script: https://pytorch.org/get-started"
        return finding_of(_AREA, "torch", text, remedy, data=dict(torch), status=Status.FATAL)
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "a build without CUDA"
    status, remedy, text = Status.FINE, "", f"torch {torch['version']}, {build}"
    if gpus and torch["cuda"] is None:
        status, text = Status.FATAL, f"{text}: it cannot use {things_in_words(gpus, 'GPU')}"
        remedy = "Install a build of torch for CUDA, or set CUDA_VISIBLE_DEVICES= (empty) to tune on the CPU."
    elif gpus and not torch["cuda_works"]:
        why = torch["cuda_error"] or "CUDA is not available"
        status, text = Status.FATAL, f"{text}, but CUDA does not work: {why}"
        remedy = "The driver is probably too old for this build: update it, or install a torch for an older CUDA."
    elif gpus and (missing := _unsupported(torch)):
        status, text = Status.PROBLEM, f"{text}, without code for compute capability {', '.join(missing)}"
        remedy = "Install a build of torch that lists this GPU's architecture."
    return finding_of(_AREA, "torch", text, remedy, data=dict(torch), status=status)


def _unsupported(torch: Mapping[str, Any]) -> list[str]:
    """Return the GPUs' compute capabilities for which torch has neither a compatible binary (sm) nor PTX (compute)."""
    names = [str(name).rpartition("_") for name in torch.get("architectures", [])]
    known = [(kind, int("".join(filter(str.isdigit, number)) or 0)) for kind, _, number in names]
    missing = []
    for major, minor in torch.get("capabilities", []):
        capability = 10 * major + minor
        binary = any(kind == "sm" and number // 10 == major and number <= capability for kind, number in known)
        compiled = any(kind == "compute" and number <= capability for kind, number in known)
        if known and not binary and not compiled:
            missing.append(f"{major}.{minor}")
    return sorted(set(missing))


def _deepspeed(deepspeed: Mapping[str, Any]) -> Finding:
    if "error" in deepspeed:
        text = f"DeepSpeed cannot be imported: {deepspeed['error']}"
        remedy = "pip install 'deepspeed>=0.14.5' into the environment of your script"
        return finding_of(_AREA, "deepspeed", text, remedy, data=dict(deepspeed), status=Status.FATAL)
    text = f"DeepSpeed {deepspeed['version']}, running on {deepspeed['accelerator']}"
    return finding_of(_AREA, "deepspeed", text, data=dict(deepspeed))


def _nvcc(torch: Mapping[str, Any]) -> Finding:
    """Return whether the CUDA toolkit can compile DeepSpeed's operators: its major version must equal torch's."""
    toolkit, wanted = torch["toolkit"], str(torch["cuda"])
    result = toolkit["version"]
    if result is not None and result.split(".")[0] == wanted.split(".")[0]:
        text = f"nvcc {result} ({toolkit['home']}) compiles DeepSpeed's operators"
        return finding_of(_AREA, "nvcc", text, data=toolkit)
    why = toolkit["why_not"] if result is None else f"nvcc ({toolkit['home']}) is of CUDA {result}, torch of {wanted}"
    text = f"DeepSpeed's operators for GPUs (FusedAdam, CPUAdam and others) cannot be compiled: {why.rstrip('.')}."
    remedy = (
        f"Install the CUDA toolkit {wanted} and set CUDA_HOME to it; or use optimizers of torch "
        '("torch_adam": true in their params).'
    )
    return finding_of(_AREA, "nvcc", text, remedy, data=toolkit)


def _communication(torch: Mapping[str, Any], gpus: int) -> Finding:
    data = {"backend": "nccl" if gpus else "gloo", "nccl_version": torch.get("nccl_version")}
    version = f" {torch['nccl_version']}" if gpus and torch.get("nccl_version") else ""
    words = f"NCCL{version}" if gpus else "gloo"
    return finding_of(_AREA, "communication", f"Communication backend: {words}.", data=data)


_USES = {
    "CPUAdamBuilder": "Adam with the optimizer offloaded",
    "FusedAdamBuilder": "Adam on the device",
    ASYNC_IO: "offload to NVMe",
    COMMUNICATION: "communication on the CPU",
}
"""Class of the builder -> use of its operator."""
_WARM = (
    "each is forked from a process that has imported torch, DeepSpeed and the modules of the script; if that proves "
    "unsafe, torchrun starts it"
)


class BuildState(StrEnum):
    """Availability of an operator of DeepSpeed."""

    BUILT = "built"
    CAN_BE = "can be built"
    CANNOT = "cannot be built"


def state_of(libraries: Libraries, builder: str, *, environ: Mapping[str, str]) -> tuple[BuildState, str]:
    """Return the availability of a builder's operator in ``environ``, and the reason why it cannot be built."""
    if libraries.is_installed(builder) or is_built(builder, environ):
        return BuildState.BUILT, ""
    compatible, why = libraries.operator(builder)
    if not compatible:
        return BuildState.CANNOT, why.strip().rstrip(".") or "DeepSpeed does not say why"
    path, ninja = compiler(environ)
    missing = [name for name, there in (("C++ compiler", path), ("ninja", ninja)) if not there]
    if missing:
        return BuildState.CANNOT, f"there is no {' and no '.join(missing)}"
    return BuildState.CAN_BE, ""


def operators(libraries: Libraries, *, gpus: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each operator that launches on ``gpus`` (0: the CPU) may need."""
    for builder, use in _USES.items() if libraries.usable else ():
        if builder == COMMUNICATION and gpus:
            continue
        name = operator_name(builder)
        state, why = state_of(libraries, builder, environ=environ)
        text = f"{name} ({use}): {state.value}"
        if state is BuildState.CAN_BE:
            text += ", on first use, which may take minutes"
        text = f"{text}, because: {why}." if why else f"{text}."
        yield finding_of(
            "operators",
            name,
            text,
            status=Status.NOTE if state is BuildState.CANNOT else Status.FINE,
            data={"builder": builder, "state": state.value, "why_not": why},
        )


def offloads(libraries: Libraries, *, nvme: Path | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on each kind of offload; ``nvme`` is the folder for NVMe offload, if any."""
    if not libraries.usable:
        return
    state, why = state_of(libraries, "CPUAdamBuilder", environ=environ)
    text = (
        f"Optimizer offload to the CPU can work (ZeRO 1 to 3): DeepSpeedCPUAdam {'is ' * state.startswith('b')}{state}."
    )
    remedy, data = "", dict[str, object](works=True)
    if state is BuildState.CANNOT:
        text = f"Optimizer offload to the CPU cannot use DeepSpeedCPUAdam, which cannot be built ({why})."
        remedy = (
            "Install a C++ compiler and ninja; on a GPU, the CUDA toolkit that torch was built with. Or let the "
            'optimizer be torch\'s: "torch_adam": true in its params.'
        )
        data = {"works": False, "why_not": why}
    yield finding_of("offload", "optimizer to the CPU", text, remedy, data=data)
    state, why = state_of(libraries, ASYNC_IO, environ=environ)
    status, remedy = Status.NOTE if nvme is None else Status.FINE, ""
    if state is BuildState.CANNOT:
        text = f"Offload to NVMe cannot work: DeepSpeed's operator async_io cannot be built ({why})."
        status, remedy = Status.NOTE if nvme is None else Status.PROBLEM, "apt install libaio-dev"
    elif nvme is None:
        text = "Offload to NVMe can work once there is a drive: --nvme-path FOLDER measures one."
    else:
        text = f"Offload to NVMe can work (ZeRO 3): search it with --nvme-path {nvme}."
    works = state is not BuildState.CANNOT and nvme is not None
    yield finding_of("offload", "to NVMe", text, remedy, status=status, data={"works": works, "why_not": why})


def launcher() -> Finding:
    """Return the finding on the launcher that a search would use: ``warm``, or ``torchrun`` where it cannot fork."""
    if can_fork():
        name, text = "warm", _WARM
    else:
        name, text = "torchrun", "forks need Linux 5.3 or newer"
    return finding_of("launches", "launcher", f"Launcher: {name} ({text}).", data={"launcher": name})
