"""A pipeline with fewer samples than its configured micro-batch: few_samples.py CONFIG."""

import sys

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch.utils.data import TensorDataset

deepspeed.init_distributed()
layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
model = PipelineModule(layers=layers, num_stages=1, loss_fn=torch.nn.MSELoss())
data = TensorDataset(torch.ones(5, 4), torch.zeros(5, 1))
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=sys.argv[1], training_data=data
)
for _ in range(20):
    engine.train_batch()
