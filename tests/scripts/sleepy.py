"""A negligible model whose data loader takes a known time for a batch: ``sleepy.py CONFIG SECONDS``."""

import sys
import time

import deepspeed
import torch

model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
for _ in range(100):
    time.sleep(float(sys.argv[2]))
    loss = engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).mean()
    engine.backward(loss)
    engine.step()
