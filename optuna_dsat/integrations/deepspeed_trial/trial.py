"""What a model definition implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from optuna_dsat.integrations.deepspeed_trial.context import DeepSpeedTrialContext

__all__ = ["DeepSpeedTrial", "TorchData"]

TorchData = torch.Tensor | Mapping[str, Any] | Sequence[Any]
"""A batch: a tensor, or mappings and sequences of them."""


class DeepSpeedTrial(ABC):
    """A model definition: engines, data, and what one batch is.

    ``__init__(context)`` builds the engines with ``deepspeed.initialize`` and registers each with
    ``context.wrap_model_engine``; ``torch.distributed`` runs by then, unless the environment variable
    ``OPTUNA_DSAT_MANUAL_INIT_DISTRIBUTED`` leaves that to the definition.

    Args:
        context: Hyperparameters, devices, and where engines, reducers and model parallelism are registered.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context

    @abstractmethod
    def build_training_data_loader(self) -> Any:
        """Return the training data, in batches of ``train_micro_batch_size_per_gpu`` samples.

        Called on the ranks that read data. A ``DataLoader`` of this package, or any loader once
        ``context.disable_dataset_reproducibility_checks()`` was called.
        """

    @abstractmethod
    def build_validation_data_loader(self) -> Any:
        """Return the validation data likewise; a pipeline needs ``gradient_accumulation_steps`` batches at least."""

    @abstractmethod
    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | Mapping[str, Any]:
        """Train on one micro-batch; on a whole batch for a pipeline, or after ``disable_auto_grad_accumulation``.

        Args:
            dataloader_iter: Endless iterator over the training data; None on ranks that read none.
            epoch_idx: Passes over the data that are complete, from 0.
            batch_idx: Whole batches (optimizer steps) that are complete, from 0.

        Returns:
            Metrics by name: numbers, or tensors of one element. A tensor alone is the metric ``loss``.
        """

    @abstractmethod
    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> Mapping[str, Any]:
        """Evaluate one batch; ``gradient_accumulation_steps`` of them for a pipeline. Runs without gradients.

        Args:
            dataloader_iter: Iterator over the validation data; None on ranks that read none.
            batch_idx: Calls of this validation that are complete, from 0.

        Returns:
            Metrics by name, as ``train_batch``; averaged over samples and ranks.
        """

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Write a checkpoint into a folder; called on all ranks. The engines' own, unless overridden."""
        for number, engine in enumerate(context.engines):
            engine.save_checkpoint(str(path), tag=f"engine-{number}", save_latest=False)

    def load(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Load what ``save`` wrote; called on all ranks.

        Raises:
            FileNotFoundError: If the folder holds no checkpoint of an engine.
        """
        for number, engine in enumerate(context.engines):
            loaded, _ = engine.load_checkpoint(str(path), tag=f"engine-{number}")
            if loaded is None:
                raise FileNotFoundError(f"{path} holds no checkpoint of engine {number}.")
