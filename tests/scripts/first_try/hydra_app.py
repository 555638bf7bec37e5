"""An application of Hydra's: its batch size is a nested field that the command may override."""

import deepspeed
import hydra
import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader, TensorDataset


@hydra.main(version_base=None, config_path="conf", config_name="run")
def main(settings: DictConfig) -> None:
    """Train."""
    size = settings.data.batch_size
    config = {
        "train_micro_batch_size_per_gpu": size,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(settings.epochs):
        for (x,) in DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=size):
            engine.backward(engine(x).mean())
            engine.step()
    print(f"trained with {size}")


if __name__ == "__main__":
    main()
