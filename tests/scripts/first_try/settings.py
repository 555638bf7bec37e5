"""A batch size in a nested field of a YAML file that the command names, and a config in the code."""

import sys
from pathlib import Path

import deepspeed
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

with Path(sys.argv[1]).open() as opened:
    settings = yaml.safe_load(opened)
size = settings["data"]["loader"]["batch_size"]
config = {
    "train_micro_batch_size_per_gpu": size,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(settings["epochs"]):
    for (x,) in DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=size):
        engine.backward(engine(x).mean())
        engine.step()
print(f"trained with {size}")
