"""Check which of DeepSpeed's operators are built, can be built, or cannot be built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from optuna_dsat.doctor.finding import Finding, Status
from optuna_dsat.doctor.libraries import Libraries
from optuna_dsat.doctor.machine import compiler
from optuna_dsat.runtime.agent.operators import COMMUNICATION, is_built, operator_name

__all__ = ["BuildState", "findings", "state_of"]

_AREA = "operators"
_USES = {
    "CPUAdamBuilder": "Adam with the optimizer offloaded",
    "FusedAdamBuilder": "Adam on the device",
    "AsyncIOBuilder": "offload to NVMe",
    COMMUNICATION: "communication on the CPU",
}
"""Class of the builder -> use of its operator."""


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
    result, ninja = compiler(environ)
    missing = [name for name, there in (("a C++ compiler", result), ("ninja", ninja)) if not there]
    if missing:
        return BuildState.CANNOT, f"there is no {' and no '.join(name.removeprefix('a ') for name in missing)}"
    return BuildState.CAN_BE, ""


def findings(libraries: Libraries, *, gpus: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each operator that launches may need.

    Args:
        libraries: Capabilities of torch and DeepSpeed.
        gpus: Number of GPUs that launches would use; 0 for the CPU.
        environ: Environment of launches.
    """
    if not libraries.usable:
        return
    for builder, use in _USES.items():
        if builder == COMMUNICATION and gpus:
            continue
        name = operator_name(builder)
        state, why = state_of(libraries, builder, environ=environ)
        text = f"{name} ({use}): {state.value}"
        if state is BuildState.CAN_BE:
            text += ", on first use, which takes 1 to 3 min"
        yield Finding(
            area=_AREA,
            name=name,
            status=Status.NOTE if state is BuildState.CANNOT else Status.FINE,
            text=f"{text}, because: {why}." if why else f"{text}.",
            data={"builder": builder, "state": state.value, "why_not": why},
        )
