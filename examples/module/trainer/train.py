"""Train a small network.

torchrun --nproc_per_node 2 -m trainer.train --deepspeed_config ds_config.json
"""

from __future__ import annotations

import argparse

import deepspeed
from torch import nn
from torch.nn import functional

from .data import batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    feed = batches(engine.train_micro_batch_size_per_gpu(), width=16, seed=engine.global_rank)
    for _ in range(args.steps):
        numbers, sums = (tensor.to(engine.device) for tensor in next(feed))
        loss = functional.mse_loss(engine(numbers), sums)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
