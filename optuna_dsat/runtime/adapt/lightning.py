"""Applies the launch's config to Lightning's DeepSpeed strategy, for its Trainer and for Fabric.

The strategy reads the config before ``deepspeed.initialize`` does: it builds the model under ``zero.Init`` at ZeRO 3.
The Trainer rejects a config with ``gradient_accumulation_steps``, since it has an argument for it; that argument is set
to the launch's value instead. Batches come from the script's loader.

In measured launches, the Trainer does not validate, save, log or resume. This module does not import Lightning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from optuna_dsat.runtime.adapt.hugging_face import TrainerHook
from optuna_dsat.runtime.adapt.ranks import wrong_number
from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.overlay import GRADIENT_ACCUMULATION

_NEEDS_VALIDATION = frozenset({"Checkpoint", "EarlyStopping", "ModelCheckpoint"})
"""Class names of callbacks that save checkpoints or require validation metrics."""


class LightningHook(TrainerHook):
    """Patches Lightning once the script has imported it."""

    framework = "lightning"

    def callbacks(self) -> dict[str, Callable[[Any], None]]:
        """Return module name -> function to call with the module once it is imported."""
        return {
            "lightning.fabric.strategies.deepspeed": self._strategy_imported,
            "lightning.pytorch.strategies.deepspeed": self._trainer_strategy_imported,
            "lightning.pytorch.trainer.trainer": self._trainer_imported,
            # The same code in the separate packages lightning_fabric and pytorch_lightning.
            "lightning_fabric.strategies.deepspeed": self._strategy_imported,
            "pytorch_lightning.strategies.deepspeed": self._trainer_strategy_imported,
            "pytorch_lightning.trainer.trainer": self._trainer_imported,
        }

    def _strategy_imported(self, module: Any, *, without: str = "") -> None:
        """Apply the overlay to the config of every strategy, before its ZeRO stage is read."""

        @patch(module.DeepSpeedStrategy, "__init__")
        def init(original: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
            original(strategy, *args, **kwargs)
            if isinstance(strategy.config, Mapping):
                strategy.config = self._laid(strategy.config, without=without)

    def _trainer_strategy_imported(self, module: Any) -> None:
        self._strategy_imported(module, without=GRADIENT_ACCUMULATION)

        @patch(module.DeepSpeedStrategy, "_format_config")
        def set_accumulation_and_format(original: Any, strategy: Any) -> None:
            trainer = getattr(strategy.lightning_module, "trainer", None)
            if trainer is not None:
                own = int(trainer.accumulate_grad_batches)
                if isinstance(self._plan.overlay.get(GRADIENT_ACCUMULATION), int):
                    trainer.accumulate_grad_batches = self._plan.overlay[GRADIENT_ACCUMULATION]
                self._report(micro_batch=None, accumulation=own, options={})
            original(strategy)

    def _trainer_imported(self, module: Any) -> None:
        if not self._plan.measures:
            return
        signature = inspect.signature(module.Trainer.__init__)

        @patch(module.Trainer, "__init__")
        def init_as_launched(original: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            self._check_ranks(given.get("devices", "auto"), given.get("num_nodes", 1))
            original(*args, **kwargs)

        @patch(module.Trainer, "fit")
        def fit_without_validation(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._disable_evaluation_and_saving(trainer)
            kwargs.pop("ckpt_path", None)  # of another ZeRO stage, and not part of the measurement
            return original(trainer, *args[:4], **kwargs)

    def _check_ranks(self, devices: Any, nodes: int) -> None:
        """Check early that the Trainer's device count is the launch's number of ranks; Lightning checks it later."""
        number = _number_of(devices)
        if number is not None and nodes * number != self._rank.world_size:
            on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
            wrong = f"the script's Trainer asks for devices={devices!r}{on_nodes}"
            message = wrong_number(wrong, nodes * number, self._rank.world_size)
            raise ValueError(f'{message} or let the script say devices="auto"')

    def _disable_evaluation_and_saving(self, trainer: Any) -> None:
        trainer.callbacks = [
            callback
            for callback in trainer.callbacks
            if _NEEDS_VALIDATION.isdisjoint(base.__name__ for base in type(callback).__mro__)
        ]
        trainer.loggers = []
        trainer.limit_val_batches = 0
        trainer.num_sanity_val_steps = 0
        # Extend the training to the last measured step even if the dataset is small.
        loop, last = trainer.fit_loop, self._plan.most_steps
        if loop.max_epochs is not None and loop.max_epochs >= 0:
            loop.max_epochs = max(loop.max_epochs, last)
        if loop.epoch_loop.max_steps >= 0:
            loop.epoch_loop.max_steps = max(loop.epoch_loop.max_steps, last)


def _number_of(devices: Any) -> int | None:
    """Return the number of devices in the ``devices`` argument of Lightning's Trainer; None if unspecified.

    Args:
        devices: A number, a list of indices, either of these as text (``"2"``, ``"0,1"``), ``-1`` or ``"auto"``.
    """
    if isinstance(devices, str):
        indices = [word.strip() for word in devices.split(",") if word.strip()]
        if not all(index.isdigit() for index in indices):
            return None
        devices = int(indices[0]) if len(indices) == 1 and "," not in devices else indices
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else None
