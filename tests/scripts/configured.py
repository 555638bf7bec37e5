"""Trains a tiny model; how the config reaches DeepSpeed and how the training ends are chosen by arguments.

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
parser.add_argument("--by", choices=["dict", "path", "config_params", "args"], default="args")
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--batch", type=int, default=0)
parser.add_argument("--fail-at", type=int, default=0)
parser.add_argument("--client-optimizer", action="store_true")
parser.add_argument("--local_rank", type=int, default=0)  # DeepSpeed refuses a wrong one in ``args``
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

path = args.deepspeed_config
config = json.loads(Path(path).read_text(encoding="utf-8"))
before = copy.deepcopy(config)
model = torch.nn.Sequential(torch.nn.Linear(args.width, args.width), torch.nn.Linear(args.width, 1))
given = {"model": model, "model_parameters": model.parameters()}
if args.client_optimizer:
    given["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.001)
    config.pop("optimizer")
    before.pop("optimizer")
if args.by == "args":
    engine, *_ = initialize(args, **given)
elif args.by == "config_params":
    engine, *_ = deepspeed.initialize(config_params=config, **given)
else:
    engine, *_ = deepspeed.initialize(config=config if args.by == "dict" else path, **given)

seen = {
    "same_config": config == before,
    "deepspeed_config": args.deepspeed_config == path,
    "optuna": "optuna" in sys.modules,
    "optimizer": type(engine.basic_optimizer).__name__,
}
print(json.dumps(seen), flush=True)
batch = args.batch or engine.train_micro_batch_size_per_gpu()
for step in range(100):
    for _ in range(engine.gradient_accumulation_steps()):
        if args.fail_at and step == args.fail_at and engine.global_rank == 1:
            raise ValueError("the script's own mistake")
        engine.eval()
        engine(torch.zeros(7, args.width))
        engine.train()
        loss = engine(torch.randn(batch, args.width)).square().mean()
        engine.backward(loss)
        engine.step()
