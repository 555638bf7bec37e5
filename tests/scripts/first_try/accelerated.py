"""Accelerate without a plugin, with its own optimizer and a tracker: python accelerated.py [--batch-size N]."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()

accelerator = Accelerator(log_with="tensorboard", project_dir="logs")
accelerator.init_trackers("run", config={"lr": 1e-3})
model = torch.nn.Linear(8, 1)
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=args.batch_size),
)
for (batch,) in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
