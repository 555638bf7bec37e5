"""Base class of model definitions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from optuna_dsat.integrations.deepspeed_trial.callbacks import PyTorchCallback

if TYPE_CHECKING:
    from optuna_dsat.integrations.deepspeed_trial.context import DeepSpeedTrialContext

__all__ = ["DeepSpeedTrial", "TorchData"]

TorchData = torch.Tensor | Mapping[str, Any] | Sequence[Any]
"""A batch: a tensor, or mappings and sequences of tensors."""


class DeepSpeedTrial(ABC):
    """Base class of model definitions: engines, data loaders, and training and evaluation of a batch.

    ``__init__(context)`` builds the engines with ``deepspeed.initialize`` and registers each with
    ``context.wrap_model_engine``. ``torch.distributed`` is already initialized, unless the environment variable
    ``OPTUNA_DSAT_MANUAL_INIT_DISTRIBUTED`` leaves that to the definition.

    Args:
        context: Provides hyperparameters and device; registers engines, reducers and model parallelism.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context

    @abstractmethod
    def build_training_data_loader(self) -> Any:
        """Return a loader of training data, in batches of ``train_micro_batch_size_per_gpu`` samples.

        Called on the ranks that read data. Returns this package's ``DataLoader``, or any loader if
        ``context.disable_dataset_reproducibility_checks()`` was called.
        """

    @abstractmethod
    def build_validation_data_loader(self) -> Any:
        """Return a loader of validation data; a pipeline needs at least ``gradient_accumulation_steps`` batches."""

    @abstractmethod
    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | Mapping[str, Any]:
        """Train on a micro-batch, or on a global batch for a pipeline or after ``disable_auto_grad_accumulation``.

        Args:
            dataloader_iter: Infinite iterator over the training data; None on ranks that read no data.
            epoch_idx: Number of completed epochs.
            batch_idx: Number of completed global batches (optimizer steps).

        Returns:
            Mapping of metric name -> number or single-element tensor. A tensor instead of a mapping is the metric
            ``loss``.
        """

    @abstractmethod
    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> Mapping[str, Any]:
        """Evaluate a batch, or ``gradient_accumulation_steps`` batches for a pipeline, without gradients.

        Args:
            dataloader_iter: Iterator over the validation data; None on ranks that read no data.
            batch_idx: Number of completed calls in this validation.

        Returns:
            Metrics as in ``train_batch``; they are averaged over samples and ranks.
        """

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return the callbacks by name; none unless overridden."""
        return {}

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Write a checkpoint into a folder; called on all ranks. Saves the engines' checkpoints unless overridden."""
        for number, engine in enumerate(context.engines):
            engine.save_checkpoint(str(path), tag=f"engine-{number}", save_latest=False)

    def load(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Load a checkpoint written by ``save``; called on all ranks.

        Raises:
            FileNotFoundError: If the folder contains no checkpoint of an engine.
        """
        for number, engine in enumerate(context.engines):
            loaded, _ = engine.load_checkpoint(str(path), tag=f"engine-{number}")
            if loaded is None:
                raise FileNotFoundError(f"{path} holds no checkpoint of engine {number}.")
