"""Train a pipeline of two stages, one on each rank.

torchrun --nproc_per_node 2 train.py --deepspeed_config ds_config.json
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH = 16


def samples(size: int = 4096) -> TensorDataset:
    """Return random numbers (size, WIDTH) and their sums (size, 1)."""
    numbers: Tensor = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(numbers, numbers.sum(1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    deepspeed.init_distributed()
    layers = [nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)]
    model = PipelineModule(layers=layers, num_stages=args.stages, loss_fn=nn.MSELoss())
    engine, *_ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=samples()
    )
    for _ in range(args.steps):
        engine.train_batch()


if __name__ == "__main__":
    main()
