"""Public functions for training loops that the hook cannot observe.

Outside a trial both only pass their arguments through. Neither imports Optuna, torch or DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.overlay import merge, nest, read_config


class _Current:
    """The launch of this process; None outside of a launch."""

    trial: Any = None
    """``runtime.hook.DeepSpeedHook``."""


def set_current_trial(trial: Any) -> None:
    """Set the launch of this process; called by the runtime before the script runs."""
    _Current.trial = trial


def dsat_reporting_context(
    engine: Any = None, op: Any = None, steps_completed: int | None = None
) -> AbstractContextManager[None]:
    """Return a context for forward, backward and step of a micro-batch.

    Only needed if the loop does not call ``deepspeed.initialize`` or the engine's methods. Steps that are observed
    anyway are counted once, so a context may also contain a whole training that builds its engine, such as
    ``trainer.train()`` of the Hugging Face Trainer. Otherwise each context must contain at most one micro-batch: a step
    ends with the context in which the engine's ``global_steps`` increased. If the batch does not pass through the
    engine's ``forward``, it is observed at the module that the engine wraps.

    Args:
        engine: The DeepSpeed engine. Optional, and of any type, if the script has called ``deepspeed.initialize``.
            In a script with several engines, contexts of engines that are not measured do nothing.
        op: Ignored. Loops written for Determined pass ``(core_context, op)`` and need no change.
        steps_completed: Batches (optimizer steps, each of all its micro-batches) that the training has completed, as
            counted by Determined: including batches before a resumed checkpoint. The launch's result is recorded at
            the last of them. None for the engine's count, where Determined uses ``op.length``.

    Raises:
        TypeError: In a trial, if ``steps_completed`` is not an integer.
        RuntimeError: In a trial, at the end of the context, if no engine was found.
        ValueError: In a trial, if the engine was built without the trial's config.
    """
    del op
    return nullcontext() if _Current.trial is None else _Current.trial.reporting(engine, steps_completed)


def get_ds_config_from_hparams(
    hparams: Mapping[str, Any], base_dir: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Return the DeepSpeed config that ``hparams`` describes; in a trial with the trial's settings applied.

    Args:
        hparams: ``"deepspeed_config"`` is the path of the base config, a (H)JSON file; ``"overwrite_deepspeed_args"``,
            if given, is merged into it key by key, dotted keys too; None removes a key.
        base_dir: Folder that the path is relative to; None for the working directory.

    Raises:
        ValueError: If ``hparams`` has no config, the overwrites are not a mapping, or the file is not a config.
        FileNotFoundError: If the file does not exist.
    """
    name = hparams.get("deepspeed_config")
    if not isinstance(name, (str, os.PathLike)):
        raise ValueError(f'hparams["deepspeed_config"] names the DeepSpeed config, a JSON file; got {name!r}.')
    overwrites = hparams.get("overwrite_deepspeed_args") or {}
    if not isinstance(overwrites, Mapping):
        raise ValueError(f'hparams["overwrite_deepspeed_args"] is an object of settings; got {overwrites!r}.')
    path = Path(base_dir or "") / name
    if not path.is_file():
        raise FileNotFoundError(f'hparams["deepspeed_config"] is {str(name)!r}, but there is no file {path}.')
    return trial_config(merge(read_config(str(path)), nest(overwrites)))


def trial_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed config; in a trial with the trial's settings applied."""
    return dict(config) if _Current.trial is None else _Current.trial.trial_config(config)
