"""A run's folder keeps the settings of its first start, and others have to agree: kept_settings.py RUN SETTINGS."""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

kept, settings = Path(sys.argv[1], "settings.json"), yaml.safe_load(Path(sys.argv[2]).read_text())
deepspeed.init_distributed()
if kept.exists() and json.loads(kept.read_text()) != settings:
    sys.exit(f"{kept} has other settings")
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(settings))
model = torch.nn.Linear(4, 1)
optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": settings["batch_size"], "optimizer": optimizer}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for (x,) in DataLoader(TensorDataset(torch.ones(240, 4)), settings["batch_size"]):
    engine.backward(engine(x).mean())
    engine.step()
