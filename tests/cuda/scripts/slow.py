"""A small model whose steps take a known time: ``slow.py CONFIG SECONDS``."""

from __future__ import annotations

import sys
import time

import deepspeed
import torch

model = torch.nn.Linear(64, 64)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
for _ in range(100):
    time.sleep(float(sys.argv[2]))
    batch = torch.ones(engine.train_micro_batch_size_per_gpu(), 64, device=engine.device)
    engine.backward(engine(batch).mean())
    engine.step()
