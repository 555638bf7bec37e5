"""What a trial must not do: write over checkpoints, or log to where the user's real runs are.

Loading stays as it is, and so does whatever the script writes by itself.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["disable_checkpoints", "without_monitors"]

_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")
"""Sections of a DeepSpeed config that have DeepSpeed write outside the run directory; it does without each."""


def without_monitors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed config without the sections that log to trackers and files of the user's."""
    return {key: value for key, value in config.items() if key not in _MONITORS}


def disable_checkpoints(engine_class: Any) -> None:
    """Have engines of this class write no checkpoint; the first call says so in the rank's log.

    ``save_checkpoint`` and ``save_16bit_model`` take what they take and return what they return: True, and for
    the latter False where ZeRO 3 may not gather the weights. No rank waits for another in them.

    Args:
        engine_class: ``deepspeed.DeepSpeedEngine``; pipeline engines inherit from it.
    """
    said: list[str] = []
    engine_class.save_checkpoint = _skipped(engine_class.save_checkpoint, said, lambda _engine: True)
    engine_class.save_16bit_model = _skipped(engine_class.save_16bit_model, said, _would_gather)


def _would_gather(engine: Any) -> bool:
    return bool(not engine.zero_optimization_partition_weights() or engine.zero_gather_16bit_weights_on_model_save())


def _skipped(original: Callable[..., Any], said: list[str], answer: Callable[[Any], bool]) -> Callable[..., bool]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> bool:
        given = signature.bind(*args, **kwargs).arguments
        if not given["save_dir"]:
            raise ValueError(f"save_dir must be a non-empty string, got {given['save_dir']!r}")
        if not said:
            said.append(original.__name__)
            print(
                f"optuna-dsat: no checkpoint is written during a trial; {original.__name__} to "
                f"{given['save_dir']} was skipped, and so are those that follow.",
                file=sys.stderr,
                flush=True,
            )
        return answer(args[0])

    return save
