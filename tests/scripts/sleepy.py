"""A negligible model that waits for each batch: ``sleepy.py CONFIG SECONDS``; prints the time of each iteration."""

import sys
import time

import deepspeed
import torch

model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
began = time.monotonic()
for _ in range(100):
    time.sleep(float(sys.argv[2]))
    loss = engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).mean()
    engine.backward(loss)
    engine.step()
    ended = time.monotonic()
    print(f"iteration {ended - began}", flush=True)
    began = ended
