"""Software, driver and clocks with which a study is started, recorded with the study."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from optuna_dsat.launch.machine.devices import Devices
from optuna_dsat.launch.machine.nvml import Nvml, NvmlError
from optuna_dsat.script.interpreter import examined, script_versions

_GIT_S = 5.0
"""Time limit for git, in seconds; a cold network file system takes seconds."""
_CUDA_OF_TORCH = re.compile(r"^cuda\b[^=\n]*= *'([\d.]+)'", re.MULTILINE)
"""Line of ``torch/version.py``."""


def environment_of(folder: Path, python: str | None, *, on: str, devices: Devices | None) -> dict[str, str]:
    """Return the environment of a script in a folder: Python, torch, DeepSpeed, CUDA, driver, clocks, git commit.

    Unknown facts are left out, such as the driver of a cluster's nodes.
    """
    facts = {**script_versions(python, on=on), "commit": _commit(folder)}
    if on == "here":
        facts["cuda"] = _cuda_of_torch(python or sys.executable)
        facts |= _gpu_facts(devices)
    return {name: text for name, text in facts.items() if text}


def _commit(folder: Path) -> str:
    """Return the commit of a folder, with ``-dirty`` if tracked files differ from it; empty without git."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "describe", "--always", "--dirty"]
    try:
        ended = subprocess.run(
            [*command, "--abbrev=40", "--exclude=*"],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return ended.stdout.strip()


def _cuda_of_torch(python: str) -> str:
    """Return the CUDA version that an interpreter's torch was built with, without importing it; empty on the CPU."""
    for folder in examined(python).path:
        try:
            text = Path(folder, "torch", "version.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        match = _CUDA_OF_TORCH.search(text)
        return match[1] if match else ""
    return ""


def _gpu_facts(devices: Devices | None) -> dict[str, str]:
    """Return the driver, and the clocks and power limit of the first GPU; empty without NVML."""
    if devices is None or devices.kind != "cuda" or not devices.devices:
        return {}
    try:
        nvml = Nvml()
        return {"driver": nvml.driver_version(), "clocks": nvml.limits(devices.devices[0].nvml_id)}
    except NvmlError:
        return {}
