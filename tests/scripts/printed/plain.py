"""Some steps; writes what its engine got: plain.py [--deepspeed_config F] [--batch B] [--stage Z]."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--batch", type=int, default=0)
parser.add_argument("--stage", type=int)
args = parser.parse_args()
config = None
if args.stage is not None:
    config = json.loads(Path(args.deepspeed_config).read_text())
    config["zero_optimization"]["stage"], args.deepspeed_config = args.stage, None
launched = args.local_rank  # before DeepSpeed sets it
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(args=args, config=config, model=model, model_parameters=model.parameters())
size = args.batch or engine.train_micro_batch_size_per_gpu()
for _ in range(8):
    engine.backward(engine(torch.ones(size, 4)).mean())
    engine.step()
found = {"stage": engine.zero_optimization_stage(), "batch": size, "local_rank": launched}
Path("got.json").write_text(json.dumps(found))
