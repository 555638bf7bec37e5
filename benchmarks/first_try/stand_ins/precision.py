"""bf16 for a Trainer without a GPU: torch computes it on a CPU, and transformers asks only GPUs for it."""

from __future__ import annotations

from types import ModuleType

__all__ = ["AFTER"]


def _arguments(module: ModuleType) -> None:
    import torch

    if not torch.cuda.is_available():
        module.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined]


AFTER = {"transformers.training_args": _arguments}
