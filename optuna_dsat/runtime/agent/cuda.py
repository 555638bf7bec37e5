"""Keeps CUDA uninitialised in processes from which others are forked.

Once a process has initialised the CUDA driver (``cuInit``), every CUDA call in its forked children fails ("Cannot
re-initialize CUDA in forked subprocess"). So neither the fork server nor torchrun's agent may call CUDA, which is
checked before each fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any

_DRIVER_LIBRARY = "libcuda.so.1"
_NOT_INITIALISED = 3
"""``CUDA_ERROR_NOT_INITIALIZED`` of ``cuda.h``, returned by ``cuCtxGetCurrent`` before ``cuInit``."""

_QUERIES = ("device_count", "is_available")
"""Functions of ``torch.cuda`` that may call ``cuInit``. With ``PYTORCH_NVML_BASED_CUDA_CHECK=1`` they ask NVML first,
but fall back on the driver where NVML does not answer, and for MIG devices always."""

_originals: dict[str, Any] = {}
"""Name -> the original of the currently replaced function of ``torch.cuda``."""


def driver_is_initialised() -> bool:
    """Return whether this process has initialised the CUDA driver, so that no child forked from it can use CUDA."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL(_DRIVER_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return int(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))) != _NOT_INITIALISED
    except OSError:
        return False  # not loaded, so never called


@contextlib.contextmanager
def cuda_hidden() -> Iterator[None]:
    """Within this context torch sees no GPU in this process and does not call CUDA to count them.

    torchrun's agent computes nothing, but torch 2.9 and newer count GPUs in it to choose a NUMA binding, which they
    then do not apply (``LaunchConfig.__post_init__``; ``get_default_numa_options`` returns None).
    """
    import torch

    _replace_queries(torch, 0)
    try:
        yield
    finally:
        restore_cuda()


def use_named_gpu_count(torch: Any) -> None:
    """Make torch count the GPUs in ``CUDA_VISIBLE_DEVICES``, if set, without ``cuInit``, until ``restore_cuda``."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        _replace_queries(torch, len(list(filter(None, named.split(",")))) if torch.backends.cuda.is_built() else 0)


def _replace_queries(torch: Any, count: int) -> None:
    for name in _QUERIES:
        _originals.setdefault(name, getattr(torch.cuda, name))
    torch.cuda.is_available = lambda: count > 0
    torch.cuda.device_count = lambda: count


def restore_cuda() -> None:
    """Undo ``cuda_hidden`` or ``use_named_gpu_count`` in this process, also in a rank forked meanwhile."""
    if _originals:
        cuda: Any = sys.modules["torch"].cuda
        for name, function in _originals.items():
            setattr(cuda, name, function)
        _originals.clear()
