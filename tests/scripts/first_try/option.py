"""A batch size from an option of the script's own, and a config in the code: nothing is named to the tuner."""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
config = {
    "train_micro_batch_size_per_gpu": args.batch_size,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(args.epochs):
    for (x,) in DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=args.batch_size):
        engine.backward(engine(x).mean())
        engine.step()
