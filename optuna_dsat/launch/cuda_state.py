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

__all__ = ["cuda_hidden", "cuda_named", "driver_is_initialised", "show_cuda"]

_DRIVER_LIBRARY = "libcuda.so.1"
_NOT_INITIALISED = 3
"""``CUDA_ERROR_NOT_INITIALIZED`` of ``cuda.h``: the answer of ``cuCtxGetCurrent`` before ``cuInit``."""

_ASKED = ("device_count", "is_available")
"""Functions of ``torch.cuda`` that may call ``cuInit``. With ``PYTORCH_NVML_BASED_CUDA_CHECK=1`` they ask NVML first,
but fall back on the driver where NVML does not answer, and for MIG devices always."""

_hidden: dict[str, Any] = {}
"""The functions of ``torch.cuda`` that are replaced, by name."""


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

    _answer(torch, 0)
    try:
        yield
    finally:
        show_cuda()


def cuda_named(torch: Any) -> None:
    """Have torch count the GPUs that ``CUDA_VISIBLE_DEVICES`` names, and ask CUDA nothing, until ``show_cuda``.

    For imports before a fork: what they find out of GPUs holds for the ranks, and costs no ``cuInit``. Where the
    variable is not set, torch finds out by itself.

    Args:
        torch: The torch module.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        _answer(torch, len(list(filter(None, named.split(",")))) if torch.backends.cuda.is_built() else 0)


def _answer(torch: Any, count: int) -> None:
    for name in _ASKED:
        _hidden.setdefault(name, getattr(torch.cuda, name))
    torch.cuda.is_available = lambda: count > 0
    torch.cuda.device_count = lambda: count


def show_cuda() -> None:
    """Have torch find GPUs by itself again, as a rank does that was forked while it did not."""
    if _hidden:
        cuda: Any = sys.modules["torch"].cuda
        for name, function in _hidden.items():
            setattr(cuda, name, function)
        _hidden.clear()
