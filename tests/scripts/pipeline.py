"""A pipeline of two stages, one on each rank."""

import itertools
import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed()
layers = [torch.nn.Linear(8, 8) for _ in range(4)]
model = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.MSELoss())
config = {**json.loads(Path(sys.argv[1]).read_text()), "train_batch_size": 12, "gradient_accumulation_steps": "auto"}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
size = engine.train_micro_batch_size_per_gpu()
data = itertools.repeat((torch.ones(size, 8), torch.zeros(size, 8)))
for _ in range(20):
    engine.train_batch(data_iter=data)
