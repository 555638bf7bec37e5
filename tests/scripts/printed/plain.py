"""Some steps: plain.py [--deepspeed_config F] [--batch B]."""

import argparse

import deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--batch", type=int, default=0)
args = parser.parse_args()
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
size = args.batch or engine.train_micro_batch_size_per_gpu()
for _ in range(8):
    engine.backward(engine(torch.ones(size, 4)).mean())
    engine.step()
