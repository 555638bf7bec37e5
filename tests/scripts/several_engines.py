"""Makes several engines, as scripts with a reference model, or with a model for each fold, do.

several_engines.py reference|folds|class CONFIG
"""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

kind, path = sys.argv[1:3]
config = json.loads(Path(path).read_text(encoding="utf-8"))


def model(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))


def trained(width: int) -> Any:
    made = model(width)
    return deepspeed.initialize(model=made, model_parameters=made.parameters(), config=config)[0]


def train(engine: Any, steps: int, beside: Any = None) -> None:
    for _ in range(steps):
        inputs = torch.randn(engine.train_micro_batch_size_per_gpu(), 8)
        if beside is not None:
            with torch.no_grad():
                beside(inputs)
        engine.backward(engine(inputs).square().mean())
        engine.step()


if kind == "reference":
    frozen = {key: value for key, value in config.items() if key != "optimizer"}
    reference = deepspeed.initialize(model=model(4), config={**frozen, "zero_optimization": {"stage": 0}})[0]
    train(trained(8), 20, beside=reference.eval())
elif kind == "class":

    class Engine(deepspeed.DeepSpeedEngine):  # type: ignore[misc]
        def __init__(self) -> None:
            deepspeed.init_distributed()
            super().__init__(None, model(8), config=config, config_class=deepspeed.DeepSpeedConfig(config))

    train(Engine(), 20)
else:
    for width in range(8, 28):
        train(trained(width), 4)
print("trained to its end", flush=True)
