"""A config and a batch size in code; the model is saved as training goes on: in_code.py."""

import deepspeed
import torch
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
deepspeed.init_distributed()
model = torch.nn.Linear(4, 1)
settings = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": BATCH, "optimizer": settings}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(48, 4)), BATCH)):
    engine.backward(engine(x).mean())
    engine.step()
    if step % 4 == 0 and engine.global_rank == 0:
        torch.save(model.state_dict(), "model.pt")
