"""Callbacks of a model definition, called by the training loop on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Callbacks", "PyTorchCallback"]


class PyTorchCallback:
    """Base class of callbacks, with Determined's method names; methods do nothing unless overridden.

    Every rank has its own instance. Callbacks with state override ``state_dict`` and ``load_state_dict``; checkpoints
    include the state. During a search nothing is validated, reported or saved, so only the methods up to
    ``on_training_epoch_end`` are called.
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


class Callbacks:
    """The callbacks of a definition.

    Args:
        named: Result of the definition's ``build_callbacks``.

    Raises:
        TypeError: If ``named`` is not a mapping of names to callbacks.
    """

    def __init__(self, named: Any) -> None:
        if not isinstance(named, Mapping) or not all(isinstance(item, PyTorchCallback) for item in named.values()):
            raise TypeError(
                "build_callbacks returns a mapping of names to PyTorchCallbacks of "
                f"optuna_dsat.integrations.deepspeed_trial; got {named!r}."
            )
        self._named: dict[str, PyTorchCallback] = dict(named)

    def call(self, method: str, *args: Any) -> None:
        """Call a method of all callbacks, in the order in which they were returned."""
        for callback in self._named.values():
            getattr(callback, method)(*args)

    def overrides(self, method: str) -> bool:
        """Return whether any callback overrides a method."""
        base = getattr(PyTorchCallback, method)
        return any(getattr(type(callback), method) is not base for callback in self._named.values())

    def state(self) -> dict[str, Any]:
        """Return name -> state of each callback."""
        return {name: callback.state_dict() for name, callback in self._named.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore states returned by ``state``; callbacks without a saved state keep theirs."""
        for name, callback in self._named.items():
            if name in state:
                callback.load_state_dict(state[name])
