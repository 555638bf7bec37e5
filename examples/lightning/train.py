"""Train a small classifier with Lightning's DeepSpeed strategy, on synthetic data: on GPUs, or on a CPU without any.

    torchrun --nproc_per_node 2 train.py --config ds_config.json

The micro-batch comes from the DeepSpeed config; how many of them make a step is the Trainer's own argument.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 32
CLASSES = 8


class CPURanks(CUDAAccelerator):
    """CPU ranks in the place of GPUs: Lightning refuses its DeepSpeed strategy any accelerator but CUDA's."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing is to be selected."""

    def teardown(self) -> None:
        """Nothing is to be freed."""

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return nothing: there are no statistics of a CPU."""
        del device
        return {}

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Return the ranks' numbers."""
        return list(range(int(devices))) if isinstance(devices, int | str) else devices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return a device for each rank, numbered as the strategy demands."""
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def is_available() -> bool:
        """Return that there is always a CPU."""
        return True


class Classifier(LightningModule):
    """Two layers; learns which of the first features is the largest."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden

    def configure_model(self) -> None:
        """Build the layers where the strategy wants them built: in partitions under ZeRO 3."""
        self.layers = nn.Sequential(nn.Linear(FEATURES, self.hidden), nn.GELU(), nn.Linear(self.hidden, CLASSES))

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        """Return the cross-entropy of a batch."""
        del batch_index
        inputs, target = batch
        return functional.cross_entropy(self.layers(inputs), target)

    def validation_step(self, batch: list[Tensor], batch_index: int) -> None:
        """Log the cross-entropy of a batch."""
        self.log("val_loss", self.training_step(batch, batch_index))

    def configure_optimizers(self) -> None:
        """Leave the optimizer to the DeepSpeed config."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small classifier on synthetic data.")
    parser.add_argument("--config", default=str(Path(__file__).with_name("ds_config.json")), help="DeepSpeed config")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    config = json.loads(Path(args.config).read_text(encoding="utf-8"))
    inputs = torch.randn(args.samples, FEATURES)
    data = TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))
    trainer = Trainer(
        accelerator="cuda" if torch.cuda.is_available() else CPURanks(),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DeepSpeedStrategy(config=args.config),
        accumulate_grad_batches=args.accumulate,
        max_epochs=args.epochs,
    )
    trainer.fit(
        Classifier(args.hidden),
        train_dataloaders=DataLoader(data, batch_size=config["train_micro_batch_size_per_gpu"], shuffle=True),
        val_dataloaders=DataLoader(data, batch_size=64),
    )


if __name__ == "__main__":
    main()
