"""Some steps of accelerate, whose plugin the environment makes; writes what its engine got: prepared.py."""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=3)
engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    accelerator.backward(engine(x).mean())
    optimizer.step()
found = {"stage": engine.zero_optimization_stage(), "batch": len(x), "local_rank": -1}
Path("got.json").write_text(json.dumps(found))
