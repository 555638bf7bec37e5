"""Two rows of each sample, made by the loader: views.py [--batch_size N]."""

import argparse

import deepspeed
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--batch_size", type=int, default=4)
args = parser.parse_args()


def both(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.cat([torch.stack([x, -x]) for (x,) in samples])


deepspeed.init_distributed()
model = torch.nn.Linear(4, 1)
settings = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": args.batch_size, "optimizer": settings}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for rows in DataLoader(TensorDataset(torch.randn(240, 4)), args.batch_size, collate_fn=both, drop_last=True):
    engine.backward(engine(rows).mean())
    engine.step()
