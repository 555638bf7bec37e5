"""The machine that is proven on: its GPUs, its versions, and whether its kernels compute anything."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from optuna_dsat.errors import DsatError
from optuna_dsat.launch.machine.devices import Devices, detect_devices
from optuna_dsat.launch.machine.host import host_memory_bytes
from optuna_dsat.launch.machine.nvml import Nvml, NvmlError

__all__ = ["Machine", "NoGpuError", "first_devices", "look"]

_PACKAGES = ("torch", "deepspeed", "optuna-dsat", "optuna", "transformers", "accelerate", "lightning")
_STAND_IN_SIGNS = ("STUB_NVML_CONF", "NULL_TOTAL_MIB", "NULL_KERNEL_US")
"""Variables that only the stand-in for CUDA reads."""
_PROBE_LIMIT_S = 180.0
_PROBE = """
import json, torch
found = {"cuda": torch.version.cuda or "", "error": ""}
try:
    numbers = torch.arange(4096, dtype=torch.float32, device="cuda")
    found["computes"] = (numbers * 2).sum().item() == 4096 * 4095
    found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
except Exception as error:
    found["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
print(json.dumps(found))
"""
"""The sum is a whole number below 2**24, which fp32 holds exactly in whatever order it is made."""


class NoGpuError(DsatError):
    """There is no GPU here, or torch cannot use it."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a proof says of the machine."""

    gpus: tuple[str, ...]
    """Names of the GPUs that are used."""
    driver: str
    cuda: str
    """Version of CUDA that torch was built with."""
    capability: str
    """Compute capability, such as ``9.0``."""
    memory_bytes: int
    """Memory of one GPU as torch sees it."""
    host_memory_bytes: int
    cores: int
    stand_in: bool
    """Whether kernels compute nothing."""
    versions: Mapping[str, str]

    @property
    def has_bf16(self) -> bool:
        """Whether the GPU computes in bfloat16 (NVIDIA, from compute capability 8.0 on)."""
        return int(self.capability.partition(".")[0] or 0) >= 8

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "gpus": list(self.gpus), "versions": dict(self.versions)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Machine:
        """Build from what ``to_json`` returned."""
        return cls(**{**record, "gpus": tuple(record["gpus"])})


def look(devices: Devices) -> Machine:
    """Ask NVML, and torch in a process of its own.

    Raises:
        NoGpuError: If there is no GPU or torch cannot use it.
    """
    if devices.kind != "cuda":
        raise NoGpuError("No GPU was found, so nothing can be proven here. `optuna-dsat doctor` says more.")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=_PROBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise NoGpuError(f"torch did not answer within {_PROBE_LIMIT_S:.0f} s: nothing can be proven here.") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise NoGpuError(f"torch cannot be asked: {last[0]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if result["error"]:
        raise NoGpuError(f"torch cannot use the GPU: {result['error']}")
    try:
        driver = Nvml().driver_version()
    except NvmlError as error:
        driver = f"unknown ({error})"
    return Machine(
        gpus=tuple(device.name for device in devices.devices),
        driver=driver,
        cuda=result["cuda"],
        capability=result["capability"],
        memory_bytes=result["memory_bytes"],
        host_memory_bytes=host_memory_bytes(),
        cores=len(os.sched_getaffinity(0)),
        stand_in=not result["computes"] or any(name in os.environ for name in _STAND_IN_SIGNS),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    result = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def first_devices(gpus: int | None) -> Devices:
    """Return the GPUs to prove on, and let this process and its children see those alone.

    Args:
        gpus: How many; None for all that are visible, at most two.
    """
    result = detect_devices()
    if result.kind != "cuda":
        return result
    used = result.devices[: min(gpus or 2, result.per_launch)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device.visible_id for device in used)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return replace(result, devices=used)
