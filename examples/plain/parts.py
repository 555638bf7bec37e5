"""What the scripts of this folder train: a small network that learns to add up its inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH = 16
"""Numbers in a sample."""


class Network(nn.Module):
    """Two hidden layers."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, numbers: Tensor) -> Tensor:
        """Map (batch, WIDTH) to (batch, 1)."""
        out: Tensor = self.layers(numbers)
        return out


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """Random numbers and their sum; a sample is the same whenever asked."""

    def __init__(self, size: int = 4096) -> None:
        self.numbers = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (numbers, sum), of shapes (WIDTH,) and (1,)."""
        numbers = self.numbers[index]
        return numbers, numbers.sum(0, keepdim=True)
