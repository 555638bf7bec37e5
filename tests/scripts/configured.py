"""Trains a tiny model; how the config reaches DeepSpeed is chosen by arguments.

Prints lines of JSON: what the script itself can see.
"""

import argparse
import copy
import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed import initialize

parser = argparse.ArgumentParser()
parser.add_argument("--by", choices=["dict", "args"], default="args")
parser.add_argument("--client-optimizer", action="store_true")
parser.add_argument("--local_rank", type=int, default=0)  # DeepSpeed refuses a wrong one in ``args``
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

path = args.deepspeed_config
config = json.loads(Path(path).read_text(encoding="utf-8"))
before = copy.deepcopy(config)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
given = {"model": model, "model_parameters": model.parameters()}
if args.client_optimizer:
    given["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.001)
    config.pop("optimizer")
    before.pop("optimizer")
if args.by == "args":
    engine, *_ = initialize(args, **given)
else:
    engine, *_ = deepspeed.initialize(config=config, **given)

seen = {
    "same_config": config == before,
    "deepspeed_config": args.deepspeed_config == path,
    "optuna": "optuna" in sys.modules,
    "optimizer": type(engine.basic_optimizer).__name__,
}
print(json.dumps(seen), flush=True)
for _ in range(100):
    for _ in range(engine.gradient_accumulation_steps()):
        engine.eval()
        engine(torch.zeros(7, 8))
        engine.train()
        loss = engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 8)).square().mean()
        engine.backward(loss)
        engine.step()
