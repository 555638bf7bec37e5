"""Keeps CUDA untouched in processes that others are forked from.

A process that has initialised the CUDA driver (``cuInit``) cannot hand it on: in its forked children every CUDA call
fails ("Cannot re-initialize CUDA in forked subprocess"). So neither the parent of warm launches nor torchrun's agent
may ask CUDA anything, and before each fork it is made sure that nobody did.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["cuda_hidden", "driver_is_initialised", "show_cuda"]

_DRIVER_LIBRARY = "libcuda.so.1"
_NOT_INITIALISED = 3
"""``CUDA_ERROR_NOT_INITIALIZED`` of ``cuda.h``: the answer of ``cuCtxGetCurrent`` before ``cuInit``."""

_ASKED = ("device_count", "is_available")
"""Functions of ``torch.cuda`` that may call ``cuInit``. With ``PYTORCH_NVML_BASED_CUDA_CHECK=1`` they ask NVML first,
but fall back on the driver where NVML does not answer, and for MIG devices always."""

_hidden: dict[str, Any] = {}
"""The functions of ``torch.cuda`` that ``cuda_hidden`` has replaced, by name."""


def driver_is_initialised() -> bool:
    """Return whether this process has initialised the CUDA driver, so that no child forked from it can use CUDA.

    The driver itself says so where its library is loaded; it is never loaded for the question. Where the library
    cannot be asked, an open ``/dev/nvidia-uvm`` tells, which ``cuInit`` opens (not under WSL, nor on Jetson).
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL(_DRIVER_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return int(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))) != _NOT_INITIALISED
    except OSError:
        return False  # not loaded: nobody can have called it
    except AttributeError:
        return _holds_memory_device()


def _holds_memory_device() -> bool:
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith("/dev/nvidia-uvm"):
                return True
    return False


@contextlib.contextmanager
def cuda_hidden() -> Iterator[None]:
    """Within this context torch sees no GPU in this process, and asks CUDA nothing to find that out.

    torchrun's agent computes nothing, but torch 2.9 and newer ask for GPUs in it to choose a NUMA binding, which they
    then leave alone (``LaunchConfig.__post_init__``; ``get_default_numa_options`` returns None).
    """
    import torch

    cuda: Any = torch.cuda
    _hidden.update({name: getattr(cuda, name) for name in _ASKED})
    cuda.is_available = lambda: False
    cuda.device_count = lambda: 0
    try:
        yield
    finally:
        show_cuda()


def show_cuda() -> None:
    """End ``cuda_hidden`` early: a rank that was forked within it uses its GPUs."""
    if _hidden:
        cuda: Any = sys.modules["torch"].cuda
        for name, function in _hidden.items():
            setattr(cuda, name, function)
        _hidden.clear()
