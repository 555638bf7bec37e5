"""A scheduler of torch, which takes no optimizer of ZeRO, a key that DeepSpeed ignores, and a look at the keyboard."""

import selectors
import sys

import deepspeed
import torch
from torch.utils.data import TensorDataset

deepspeed.init_distributed()
model = torch.nn.Linear(4, 1)
settings = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu ": 16, "train_batch_size": 8, "optimizer": settings}
engine, optimizer, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=TensorDataset(torch.ones(240, 4)), config=config
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
keyboard = selectors.DefaultSelector()
keyboard.register(sys.stdin, selectors.EVENT_READ) if engine.global_rank == 0 else None
for (x,) in loader:
    engine.backward(engine(x).mean())
    engine.step()
    if engine.global_rank == 0:
        keyboard.select(timeout=0)
scheduler.step()
