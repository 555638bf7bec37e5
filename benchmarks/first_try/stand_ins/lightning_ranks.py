"""CPU ranks in the place of GPUs for Lightning, whose DeepSpeed strategy refuses any accelerator but CUDA's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

__all__ = ["AFTER"]


def _accelerator(module: ModuleType) -> None:
    import torch

    if torch.cuda.is_available():
        return
    cls: Any = module.CUDAAccelerator

    def nothing(*_: Any) -> None:
        return None

    def devices(named: Any) -> Any:
        return list(range(int(named))) if isinstance(named, int | str) else named

    def parallel(named: Any) -> list[Any]:
        return [torch.device("cpu", index) for index in named]

    cls.setup_device = cls.teardown = nothing
    cls.get_device_stats = lambda *_: {}
    cls.parse_devices = staticmethod(devices)
    cls.get_parallel_devices = staticmethod(parallel)
    cls.is_available = staticmethod(lambda: True)
    cls.auto_device_count = staticmethod(lambda: 1)


AFTER = {
    "lightning.fabric.accelerators.cuda": _accelerator,
    "lightning_fabric.accelerators.cuda": _accelerator,
    "lightning.pytorch.accelerators.cuda": _accelerator,
    "pytorch_lightning.accelerators.cuda": _accelerator,
}
