"""Batches to train on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def batches(size: int, *, width: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random numbers (size, width) and their sums (size, 1), without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        numbers = torch.randn(size, width, generator=generator)
        yield numbers, numbers.sum(1, keepdim=True)
