"""Check what this environment can do: DeepSpeed's operators, offloads, and the launcher of a search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from optuna_dsat.doctor.finding import Finding, Status, finding_of
from optuna_dsat.doctor.libraries import Libraries
from optuna_dsat.doctor.machine import compiler
from optuna_dsat.launch.warm.server import can_fork
from optuna_dsat.runtime.agent.operators import ASYNC_IO, COMMUNICATION, is_built, operator_name

_USES = {
    "CPUAdamBuilder": "Adam with the optimizer offloaded",
    "FusedAdamBuilder": "Adam on the device",
    ASYNC_IO: "offload to NVMe",
    COMMUNICATION: "communication on the CPU",
}
"""Class of the builder -> use of its operator."""
_WARM = (
    "each is forked from a process that has torch, DeepSpeed and what the script imports ready, or is a torchrun of "
    "its own where that turns out to be unsafe"
)


class BuildState(StrEnum):
    """Availability of an operator of DeepSpeed."""

    BUILT = "built"
    CAN_BE = "can be built"
    CANNOT = "cannot be built"


def state_of(libraries: Libraries, builder: str, *, environ: Mapping[str, str]) -> tuple[BuildState, str]:
    """Return the availability of an operator, and the reason why it cannot be built.

    Args:
        libraries: Capabilities of torch and DeepSpeed.
        builder: Class name of DeepSpeed's builder.
        environ: Environment of launches.
    """
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
    """Yield a finding for each operator that launches may need.

    Args:
        libraries: Capabilities of torch and DeepSpeed.
        gpus: Number of GPUs that launches would use; 0 for the CPU.
        environ: Environment of launches.
    """
    for builder, use in _USES.items() if libraries.usable else ():
        if builder == COMMUNICATION and gpus:
            continue
        name = operator_name(builder)
        state, why = state_of(libraries, builder, environ=environ)
        text = f"{name} ({use}): {state.value}"
        if state is BuildState.CAN_BE:
            text += ", on first use, which takes 1 to 3 min"
        text = f"{text}, because: {why}." if why else f"{text}."
        yield finding_of(
            "operators",
            name,
            text,
            status=Status.NOTE if state is BuildState.CANNOT else Status.FINE,
            data={"builder": builder, "state": state.value, "why_not": why},
        )


def offloads(libraries: Libraries, *, nvme: Path | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on each kind of offload.

    Args:
        libraries: Capabilities of torch and DeepSpeed.
        nvme: Folder for NVMe offload, or None.
        environ: Environment of launches.
    """
    if not libraries.usable:
        return
    state, why = state_of(libraries, "CPUAdamBuilder", environ=environ)
    reason = f" ({why.rstrip('.')})" if why else ""
    text = (
        f"Optimizer offload to the CPU can work (ZeRO 1 to 3): DeepSpeedCPUAdam {'is ' * state.startswith('b')}{state}."
    )
    remedy, data = "", dict[str, object](works=True)
    if state is BuildState.CANNOT:
        text = f"Optimizer offload to the CPU cannot use DeepSpeedCPUAdam, which cannot be built{reason}."
        remedy = (
            "Install a C++ compiler and ninja; on a GPU, the CUDA toolkit that torch was built with. Or let the "
            'optimizer be torch\'s: "torch_adam": true in its params.'
        )
        data = {"works": False, "why_not": why}
    yield finding_of("offload", "optimizer to the CPU", text, remedy, data=data)
    text = "Parameter offload to the CPU can work (ZeRO 3)."
    yield finding_of("offload", "parameters to the CPU", text, data={"works": True})

    state, why = state_of(libraries, ASYNC_IO, environ=environ)
    status, remedy = Status.NOTE if nvme is None else Status.FINE, ""
    if state is BuildState.CANNOT:
        reason = f" ({why.rstrip('.')})" if why else ""
        text = f"Offload to NVMe cannot work: DeepSpeed's operator async_io cannot be built{reason}."
        status, remedy = Status.NOTE if nvme is None else Status.PROBLEM, "apt install libaio-dev"
    elif nvme is None:
        text = "Offload to NVMe can work once there is a drive: --nvme-path FOLDER measures one."
    else:
        text = f"Offload to NVMe can work (ZeRO 3): search it with --nvme-path {nvme}."
    works = state is not BuildState.CANNOT and nvme is not None
    yield finding_of("offload", "to NVMe", text, remedy, status=status, data={"works": works, "why_not": why})


def launcher(libraries: Libraries) -> Finding:
    """Return the finding on the launcher that a search would use: the first usable of ``warm`` and ``torchrun``."""
    torchrun = "torch cannot be imported" if "error" in libraries.torch else None
    if torchrun is None and not libraries.torch["torchrun"]:
        torchrun = "this build of torch has no torch.distributed.run"
    warm = torchrun or (None if can_fork() else "it needs Linux 5.3 or newer")
    why_not = {name: why for name, why in (("warm", warm), ("torchrun", torchrun)) if why is not None}
    if torchrun is not None:
        text = f"No launcher can work ({'; '.join(f'{name}: {why}' for name, why in why_not.items())})."
        remedy = "Install torch with distributed training into the environment of your script."
        return finding_of(
            "launches", "launcher", text, remedy, status=Status.FATAL, data={"launcher": None, "why_not": why_not}
        )
    name, text = (
        ("warm", _WARM) if warm is None else ("torchrun", "every launch is a torchrun of its own on this machine")
    )
    data = {"launcher": name, "why_not": why_not}
    return finding_of("launches", "launcher", f"Launches go through {name}: {text}.", data=data)
