"""For training loops that optuna-dsat does not see by itself: two functions that a script may call.

Both do nothing of their own outside a trial, and neither imports Optuna, torch or DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from optuna_dsat.runtime.overlay import merge, read_config

__all__ = ["dsat_reporting_context", "get_ds_config_from_hparams", "set_current_trial", "trial_config"]


class _Trial(Protocol):
    """What this module needs of a launch (``runtime/hook.py``)."""

    def reporting(self, engine: Any) -> AbstractContextManager[None]: ...

    def trial_config(self, config: Mapping[str, Any]) -> dict[str, Any]: ...


class _Current:
    """The launch that this process is a rank of, if it is one."""

    trial: _Trial | None = None


def set_current_trial(trial: _Trial | None) -> None:
    """Say which launch this process is a rank of; called by the runtime before the script runs."""
    _Current.trial = trial


def dsat_reporting_context(engine: Any = None, op: Any = None) -> AbstractContextManager[None]:
    """Return a context to put around forward, backward and step of a training loop.

    Needed only where ``deepspeed.initialize`` or the engine's own methods are not what the loop calls. Steps that are
    seen anyway are counted once. Otherwise each context holds one micro-batch at most: a step ends with the context
    in which the engine's ``global_steps`` moved on. Where the batch does not reach the engine's own ``forward``, it
    is looked for at the module that the engine wraps.

    Args:
        engine: The DeepSpeed engine. May be left out, or be anything else, where the script has called
            ``deepspeed.initialize``. In a script with several engines, contexts of all but the first measured one do
            nothing.
        op: Not used. Loops written for Determined pass ``(core_context, op)`` and need no change.

    Raises:
        RuntimeError: In a trial, if there is no engine to measure.
        ValueError: In a trial, if the engine was built without the trial's config.
    """
    del op
    return nullcontext() if _Current.trial is None else _Current.trial.reporting(engine)


def get_ds_config_from_hparams(
    hparams: Mapping[str, Any], base_dir: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Return the DeepSpeed config that ``hparams`` describes; in a trial with the trial's settings laid over it.

    Args:
        hparams: ``"deepspeed_config"`` names the base config, a (H)JSON file; ``"overwrite_deepspeed_args"``, if
            given, is laid over it: objects merge key by key, None removes a key.
        base_dir: Folder that the name is relative to; None for the working directory.

    Raises:
        ValueError: If ``hparams`` names no config, the overwrites are no object, or the file holds no config.
        FileNotFoundError: If the file does not exist.
    """
    name = hparams.get("deepspeed_config")
    if not isinstance(name, str | os.PathLike):
        raise ValueError(f'hparams["deepspeed_config"] names the DeepSpeed config, a JSON file; got {name!r}.')
    overwrites = hparams.get("overwrite_deepspeed_args") or {}
    if not isinstance(overwrites, Mapping):
        raise ValueError(f'hparams["overwrite_deepspeed_args"] is an object of settings; got {overwrites!r}.')
    path = Path(base_dir or "") / name
    if not path.is_file():
        raise FileNotFoundError(f'hparams["deepspeed_config"] is {str(name)!r}, but there is no file {path}.')
    return trial_config(merge(read_config(str(path)), overwrites))


def trial_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed config; in a trial with the trial's settings laid over it."""
    return dict(config) if _Current.trial is None else _Current.trial.trial_config(config)
