"""The machine that is proven on: its GPUs, its versions, and whether its kernels compute anything."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from typing import Any

from optuna_dsat.errors import DsatError
from optuna_dsat.launch.machine.devices import Devices, detect_devices
from optuna_dsat.launch.machine.nvml import Nvml, NvmlError
from optuna_dsat.runtime.measure.memory import host_memory_bytes

_PACKAGES = ("torch", "deepspeed", "optuna-dsat", "optuna", "transformers", "accelerate", "lightning")
_STAND_IN_SIGNS = ("STUB_NVML_CONF", "NULL_TOTAL_MIB", "NULL_KERNEL_US")
"""Variables that only the stand-in for CUDA reads."""
_PROBE = """
import json, torch
numbers = torch.arange(4096, dtype=torch.float32, device="cuda")
print(json.dumps({
    "cuda": torch.version.cuda or "",
    "computes": (numbers * 2).sum().item() == 4096 * 4095,
    "capability": ".".join(map(str, torch.cuda.get_device_capability())),
    "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
}))
"""
"""The sum is a whole number below 2**24, which fp32 holds exactly in whatever order it is made."""


class NoGpuError(DsatError):
    """There is no GPU here, or torch cannot use it."""

    exit_code = 3


def look(devices: Devices) -> dict[str, Any]:
    """Ask NVML, and torch in a separate process; return the facts as JSON values with units in the names.

    ``memory_bytes`` is the memory of one GPU as torch sees it, ``capability`` its compute capability, ``stand_in``
    whether kernels compute nothing.

    Raises:
        NoGpuError: If there is no GPU or torch cannot use it.
    """
    if devices.kind != "cuda":
        raise NoGpuError("No GPU was found, so nothing can be proven here. `optuna-dsat doctor` says more.")
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise NoGpuError(f"torch cannot use the GPU: {last[0]}")
    facts = json.loads(done.stdout.splitlines()[-1])
    try:
        driver = Nvml().driver_version()
    except NvmlError as error:
        driver = f"unknown ({error})"
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpus": [device.name for device in devices.devices],
        "driver": driver,
        "cuda": facts["cuda"],
        "capability": facts["capability"],
        "memory_bytes": facts["memory_bytes"],
        "host_memory_bytes": host_memory_bytes(),
        "cores": len(os.sched_getaffinity(0)),
        "stand_in": not facts["computes"] or any(name in os.environ for name in _STAND_IN_SIGNS),
        "versions": versions,
    }


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
