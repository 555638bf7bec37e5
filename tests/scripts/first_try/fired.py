"""Python Fire calls the training with what the command line names."""

import deepspeed
import fire
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(learning_rate: float = 1e-3, batch_size: int = 3) -> None:
    """Train a tiny model."""
    model = torch.nn.Linear(8, 1)
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": learning_rate, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = TensorDataset(torch.randn(24, 8))
    for (batch,) in DataLoader(data, batch_size=batch_size):
        loss = engine(batch).pow(2).mean()
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    fire.Fire({"train": train})
