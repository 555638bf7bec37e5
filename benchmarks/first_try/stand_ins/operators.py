"""The operators that torchvision's Python needs declared where its compiled part does not fit torch's build."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["AFTER"]


def _declare(torch: ModuleType) -> None:
    result = importlib.util.find_spec("torchvision")
    if result is None or result.origin is None or torch.version.cuda is not None:
        return
    try:
        torch.ops.load_library(str(Path(result.origin).parent / "_C.so"))
    except (OSError, RuntimeError):  # built for CUDA, which this torch lacks
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


AFTER = {"torch": _declare}
