"""Base classes of model definitions and their callbacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch

if TYPE_CHECKING:
    from optuna_dsat.integrations.deepspeed_trial.context import DeepSpeedTrialContext

TorchData = Union[torch.Tensor, Mapping[str, Any], Sequence[Any]]  # Python 3.9 has no |
"""A batch: a tensor, or mappings and sequences of tensors."""


class PyTorchCallback:
    """Base class of callbacks, with Determined's method names; methods do nothing unless overridden.

    Every rank has its own instance. Checkpoints include the result of ``state_dict``. During a search nothing is
    validated, reported or saved, so only the methods up to ``on_training_epoch_end`` are called.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Called before the first batch.

        Args:
            first_batch_idx: Completed global batches; 0 unless training resumes.
            checkpoint_uuid: Folder name of the checkpoint that training resumes from, if any.
        """

    def on_training_start(self) -> None:
        """Called once before the first batch, after a checkpoint was loaded."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Called before the first batch of an epoch; epochs are counted from 0."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Called after the last batch of an epoch."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Called after each reporting period.

        Args:
            avg_metrics: Metrics of the period, reduced over batches and ranks.
            batch_metrics: Metrics returned by each ``train_batch`` call on this rank.
        """

    def on_validation_start(self) -> None:
        """Called before a validation."""

    def on_validation_epoch_start(self) -> None:
        """Called before the batches of a validation."""

    def on_validation_epoch_end(self, outputs: list[dict[str, Any]]) -> None:
        """Called after the batches of a validation with the results of ``evaluate_batch`` on this rank."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Called after a validation with its reduced metrics; added entries are reported."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before the definition's ``load`` with this rank's state."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; entries added to this rank's state are saved."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Called after a checkpoint was written to its folder."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Called after ``on_checkpoint_write_end`` with the name of the checkpoint's folder."""

    def on_trial_shutdown(self) -> None:
        """Called at the end of training, even if it fails."""

    def state_dict(self) -> dict[str, Any]:
        """Return the picklable state to include in checkpoints."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned."""


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
                raise FileNotFoundError(f"{path} contains no checkpoint of engine {number}.")
