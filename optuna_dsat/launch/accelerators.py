"""Devices other than NVIDIA's GPUs: none is supported, and the user is told before a search runs on the CPU instead.

The platform torch was built for is read from its version (``2.9.0+rocm6.4``, ``2.9.0+xpu``: the wheels of
pytorch.org), without importing it.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path

from optuna_dsat.errors import UsageError

__all__ = ["other_devices", "refuse_other_builds"]

_BUILDS = {"rocm": "AMD GPUs (ROCm)", "xpu": "Intel GPUs (XPU)"}
"""Local version tag of torch -> platform it was built for."""

_NODES = {
    "kfd": "an AMD GPU's driver (/dev/kfd)",
    "nvhost-gpu": "the GPU of a Jetson (/dev/nvhost-gpu)",
    "nvgpu": "the GPU of a Jetson (/dev/nvgpu)",
}
"""Name of a device file -> the device it belongs to."""

_DEV = Path("/dev")
_SUPPORTED = "optuna-dsat tunes on NVIDIA GPUs that NVML knows, and on the CPU"


def refuse_other_builds(environ: Mapping[str, str]) -> None:
    """Refuse a build of torch or a setting of DeepSpeed for devices other than NVIDIA's GPUs and the CPU.

    Raises:
        UsageError: If there is one; names what is supported and how to tune on the CPU.
    """
    wanted = environ.get("DS_ACCELERATOR", "")
    if wanted not in ("", "cuda", "cpu"):
        raise UsageError(
            f"DS_ACCELERATOR is {wanted!r}: {_SUPPORTED}. Unset it, or tune on the CPU with --cpu-ranks 2."
        )
    version = _torch_version()
    tag = re.match(r"[a-z]*", version.partition("+")[2])
    built_for = _BUILDS.get(tag.group() if tag else "")
    if built_for is not None:
        raise UsageError(
            f"torch {version} is a build for {built_for}: {_SUPPORTED}. Tune on the CPU with --cpu-ranks 2, or install "
            "a build of torch for CUDA."
        )


def other_devices() -> tuple[str, ...]:
    """Return a line for the user on each unsupported GPU of this machine."""
    return tuple(
        f"This machine has {what}, which is not used: {_SUPPORTED}."
        for name, what in _NODES.items()
        if (_DEV / name).exists()
    )


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
