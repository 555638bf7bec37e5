"""Train a small convolutional network with DeepSpeed to count the discs in a picture.

    DS_ACCELERATOR=cpu LOCAL_SIZE=2 torchrun --nproc_per_node 2 train.py

The pictures are drawn when they are asked for, so that the data loader has work to do and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIDE = 32
"""Pixels of a picture's side."""
MOST = 7
"""Most discs in a picture."""


class Discs(Dataset[tuple[Tensor, int]]):
    """Pictures of 0 to ``MOST`` coloured discs that may overlap."""

    def __init__(self, size: int) -> None:
        self.size = size
        axis = torch.arange(SIDE, dtype=torch.float32)
        self.rows, self.columns = axis[:, None], axis[None, :]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return a picture (3, side, side) and its number of discs, the same whenever asked."""
        draw = torch.Generator().manual_seed(index)
        count = int(torch.randint(MOST + 1, (), generator=draw))
        picture = torch.zeros(3, SIDE, SIDE)
        for row, column, radius, red, green, blue in torch.rand(count, 6, generator=draw).tolist():
            distance = (self.rows - SIDE * row) ** 2 + (self.columns - SIDE * column) ** 2
            picture[:, distance < (2 + 3 * radius) ** 2] = torch.tensor([red, green, blue])[:, None]
        return picture, count


class Block(nn.Module):
    """Two convolutions with group normalisation and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, out), nn.GroupNorm(4, out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, side, side) to (batch, out, side / stride, side / stride)."""
        y = self.norm2(self.second(functional.relu(self.norm1(self.first(x)))))
        return functional.relu(y + self.shortcut(x))


class Network(nn.Module):
    """Three residual stages and a linear classifier; returns the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            Block(3, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )  # fmt: skip
        self.head = nn.Linear(4 * width, MOST + 1)

    def forward(self, pictures: Tensor, counts: Tensor) -> Tensor:
        """Return the mean cross-entropy of the numbers of discs in pictures (batch, 3, side, side)."""
        features = self.blocks(pictures).mean(dim=(2, 3))
        return functional.cross_entropy(self.head(features), counts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on drawn pictures.")
    parser.add_argument("--width", type=int, default=24, help="channels of the first stage; a multiple of 4")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--samples", type=int, default=65536, help="size of the data set")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    config = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Network(args.width)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    data = Discs(args.samples)
    sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=config["train_micro_batch_size_per_gpu"], sampler=sampler, drop_last=True)
    step, epoch = 0, 0
    while step < args.steps and len(loader):
        sampler.set_epoch(epoch)
        for pictures, counts in loader:
            loss = engine(pictures.to(engine.device), counts.to(engine.device))
            engine.backward(loss)
            engine.step()
            step += engine.is_gradient_accumulation_boundary()
            if step >= args.steps:
                break
        epoch += 1
    if step and engine.global_rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
