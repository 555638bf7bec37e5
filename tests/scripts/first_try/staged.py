"""A ZeRO stage from an option of the script's own, which also decides how the model is built."""

import argparse
import os

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=1, choices=[1, 2, 3])
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": args.stage},
}
deepspeed.init_distributed(dist_backend="gloo")
with deepspeed.zero.Init(enabled=args.stage == 3, config_dict_or_path=config):
    model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(6):
    engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).mean())
    engine.step()
if os.environ["RANK"] == "0":
    print(f"option {args.stage}, ZeRO {engine.zero_optimization_stage()}")
