"""A constant batch size, a config by an option that nobody gives, and a module that is called directly."""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
args = parser.parse_args()
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
loader = DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=BATCH)
for _ in range(3):
    for (x,) in loader:
        engine.backward((model(x) + model(2 * x)).mean())
        engine.step()
