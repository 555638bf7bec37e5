"""A model definition as Determined's users write it; its imports alone name optuna-dsat.

optuna-dsat asha  model_def:MyTrial ds_config.json --hparams hparams.yaml
optuna-dsat train model_def:MyTrial ds_config.json --hparams hparams.yaml --max-length 100batches --checkpoint-dir runs
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from optuna_dsat.integrations.deepspeed_trial import (
    AttrDict,
    DataLoader,
    DeepSpeedTrial,
    DeepSpeedTrialContext,
    overwrite_deepspeed_config,
)


def samples(size: int, width: int, seed: int) -> TensorDataset:
    """Return random numbers (size, width) and their sums (size, 1)."""
    numbers: Tensor = torch.randn(size, width, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, numbers.sum(1, keepdim=True))


class MyTrial(DeepSpeedTrial):
    """Learns sums, with dropout."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.args = AttrDict(context.get_hparams())
        model = nn.Sequential(
            nn.Linear(self.args.width, self.args.hidden),
            nn.ReLU(),
            nn.Dropout(self.args.dropout),
            nn.Linear(self.args.hidden, 1),
        )
        config = overwrite_deepspeed_config(self.args.deepspeed_config, self.args.get("overwrite_deepspeed_args", {}))
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.engine = context.wrap_model_engine(engine)
        self.largest_error = context.wrap_reducer(max, name="largest_error", for_training=False)

    def build_training_data_loader(self) -> DataLoader:
        data = samples(self.args.samples, self.args.width, seed=1)
        return DataLoader(data, batch_size=self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        data = samples(101, self.args.width, seed=2)
        return DataLoader(data, batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        assert dataloader_iter is not None
        loss = self._error(next(dataloader_iter)).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        assert dataloader_iter is not None
        error = self._error(next(dataloader_iter))
        self.largest_error.update(error.abs().max().item())
        return {"loss": error.square().mean()}

    def _error(self, batch: Any) -> Tensor:
        numbers, sums = self.context.to_device(batch)
        return self.engine(numbers) - sums
