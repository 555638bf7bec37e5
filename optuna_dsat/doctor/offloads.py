"""Check which offloads can work in this environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from optuna_dsat.doctor.finding import Finding, Status
from optuna_dsat.doctor.libraries import Libraries
from optuna_dsat.doctor.operators import BuildState, state_of

__all__ = ["findings"]

_AREA = "offload"
_IS = {BuildState.BUILT: "is built", BuildState.CAN_BE: "can be built"}
_TORCH_ADAM = 'Or let the optimizer be torch\'s: "torch_adam": true in its params.'


def findings(libraries: Libraries, *, nvme: Path | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on each kind of offload.

    Args:
        libraries: Capabilities of torch and DeepSpeed.
        nvme: Folder for NVMe offload, or None.
        environ: Environment of launches.
    """
    if not libraries.usable:
        return
    yield _optimizer(libraries, environ)
    yield Finding(
        area=_AREA,
        name="parameters to the CPU",
        status=Status.FINE,
        text="Parameter offload to the CPU can work (ZeRO 3).",
        data={"works": True},
    )
    yield _to_nvme(libraries, nvme, environ)


def _optimizer(libraries: Libraries, environ: Mapping[str, str]) -> Finding:
    state, why = state_of(libraries, "CPUAdamBuilder", environ=environ)
    if state is not BuildState.CANNOT:
        return Finding(
            area=_AREA,
            name="optimizer to the CPU",
            status=Status.FINE,
            text=f"Optimizer offload to the CPU can work (ZeRO 1 to 3): DeepSpeedCPUAdam {_IS[state]}.",
            data={"works": True},
        )
    return Finding(
        area=_AREA,
        name="optimizer to the CPU",
        status=Status.PROBLEM,
        text=f"Optimizer offload to the CPU cannot use DeepSpeedCPUAdam, which cannot be built{_reason_suffix(why)}.",
        remedy=f"Install a C++ compiler and ninja; on a GPU, the CUDA toolkit that torch was built with. {_TORCH_ADAM}",
        data={"works": False, "why_not": why},
    )


def _to_nvme(libraries: Libraries, nvme: Path | None, environ: Mapping[str, str]) -> Finding:
    state, why = state_of(libraries, "AsyncIOBuilder", environ=environ)
    works = state is not BuildState.CANNOT
    data = {"works": works and nvme is not None, "why_not": why}
    if not works:
        return Finding(
            area=_AREA,
            name="to NVMe",
            status=Status.NOTE if nvme is None else Status.PROBLEM,
            text=f"Offload to NVMe cannot work: DeepSpeed's operator async_io cannot be built{_reason_suffix(why)}.",
            remedy="apt install libaio-dev",
            data=data,
        )
    if nvme is None:
        return Finding(
            area=_AREA,
            name="to NVMe",
            status=Status.NOTE,
            text="Offload to NVMe can work once there is a drive: --nvme FOLDER measures one.",
            data=data,
        )
    return Finding(
        area=_AREA,
        name="to NVMe",
        status=Status.FINE,
        text=f"Offload to NVMe can work (ZeRO 3): search it with --nvme-path {nvme}.",
        data=data,
    )


def _reason_suffix(why: str) -> str:
    return f" ({why.rstrip('.')})" if why else ""
