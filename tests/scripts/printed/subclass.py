"""An engine of a class of its own, built without ``deepspeed.initialize``: subclass.py."""

import deepspeed
import torch
from deepspeed import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4


class Engine(DeepSpeedEngine):  # type: ignore[misc]
    """Starts the communication, too."""

    def __init__(self, model: torch.nn.Module, config: dict[str, object]) -> None:
        deepspeed.init_distributed()
        super().__init__(args=None, model=model, config=config, config_class=DeepSpeedConfig(config))


settings = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
engine = Engine(torch.nn.Linear(4, 1), {"train_micro_batch_size_per_gpu": BATCH, "optimizer": settings})
for (x,) in DataLoader(TensorDataset(torch.ones(48, 4)), BATCH):
    engine.backward(engine(x).mean())
    engine.step()
