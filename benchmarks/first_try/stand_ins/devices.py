"""What scripts ask of GPUs, led to the CPU where there is none.

Calls of CUDA that place tensors or choose a device; Lightning's accelerator, whose DeepSpeed strategy takes CUDA's
alone; bf16, which transformers asks only GPUs for; operators of torchvision whose compiled part does not fit torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
    *("tensor", "zeros", "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)
_CUDA = re.compile(r"cuda(:\d+)?$")


def _on_cpu(value: Any) -> Any:
    """Return a device as it is, or the CPU where it is a GPU or the number of one."""
    if isinstance(value, bool):
        return value
    is_cuda = type(value).__name__ == "device" and value.type == "cuda"
    return "cpu" if is_cuda or isinstance(value, int) or (isinstance(value, str) and _CUDA.match(value)) else value


def _led(function: Callable[..., Any], *, positional: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if positional and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return function(*args, **kwargs)

    return run


def _same(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


def _nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of its own that does nothing: torch.compile knows each function of torch by its identity."""

    @functools.wraps(function)
    def nothing(*_: Any, **__: Any) -> None:
        return None

    return nothing


def _torch(torch: Any) -> None:
    if torch.cuda.is_available():
        return
    # It remembers the factories as they are, for `with torch.device(...)`.
    importlib.import_module("torch.utils._device")._device_constructors()
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = _led(owner.to, positional=True)
        owner.cuda = _same
    for name in _FACTORIES:
        setattr(torch, name, _led(getattr(torch, name), positional=False))
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        setattr(torch.cuda, name, _nothing(getattr(torch.cuda, name)))
    torch.cuda.current_device = lambda: int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.device_count = _for_scripts(torch.cuda.device_count)
    torch.distributed.init_process_group = _over_gloo(torch.distributed.init_process_group, "backend")


def _for_scripts(count: Callable[[], int]) -> Callable[[], int]:
    """Return a count of devices that tells a script of the checkout, and nobody else, of one for each rank."""
    folder = os.environ.get("FIRST_TRY_CHECKOUT", "")

    @functools.wraps(count)
    def devices() -> int:
        asked_by = sys._getframe(1).f_code.co_filename
        if folder and os.path.abspath(asked_by).startswith(folder + os.sep):  # noqa: PTH100 (as a rank starts)
            return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return count()

    return devices


def _over_gloo(function: Callable[..., Any], keyword: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if arg == "nccl" else arg for arg in args)
        if kwargs.get(keyword) == "nccl":
            kwargs[keyword] = "gloo"
        return function(*args, **kwargs)

    return run


def _communication(comm: Any) -> None:
    comm.init_distributed = _over_gloo(comm.init_distributed, "dist_backend")


def _lightning(module: Any) -> None:
    """Let the CUDA accelerator of Lightning give CPU ranks."""
    import torch

    if torch.cuda.is_available():
        return
    cls: Any = module.CUDAAccelerator
    cls.setup_device = cls.teardown = _nothing(cls.setup_device)
    cls.get_device_stats = lambda *_: {}
    cls.parse_devices = staticmethod(lambda named: list(range(int(named))) if isinstance(named, int | str) else named)
    cls.get_parallel_devices = staticmethod(lambda named: [torch.device("cpu", index) for index in named])
    cls.is_available = staticmethod(lambda: True)
    cls.auto_device_count = staticmethod(lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _bf16(module: Any) -> None:
    import torch

    if not torch.cuda.is_available():
        module.is_torch_bf16_gpu_available = lambda: True


def _torchvision(torch: Any) -> None:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or torch.version.cuda is not None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).parent / "_C.so"))
    except (OSError, RuntimeError):  # built for CUDA, which this torch lacks
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _torch_and_torchvision(torch: Any) -> None:
    _torch(torch)
    _torchvision(torch)


AFTER = {
    "torch": _torch_and_torchvision,
    "deepspeed.comm.comm": _communication,
    "transformers.training_args": _bf16,
    **dict.fromkeys(
        (
            *("lightning.fabric.accelerators.cuda", "lightning_fabric.accelerators.cuda"),
            *("lightning.pytorch.accelerators.cuda", "pytorch_lightning.accelerators.cuda"),
        ),
        _lightning,
    ),
}
